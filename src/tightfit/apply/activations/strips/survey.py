"""A call of an autoencoder's method → how else it could be done, in strips: what each way takes, and what it does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from tightfit.apply.activations.strips.capture import NotTakenApart
from tightfit.apply.activations.strips.labour import legs_of
from tightfit.apply.activations.strips.method import program_of
from tightfit.apply.activations.strips.trials import Trials
from tightfit.apply.activations.strips.ways import Way as Strips
from tightfit.decisions import Maps
from tightfit.footprint import Way
from tightfit.measure.modules import find_leaves

__all__ = ["survey"]

SHARES = (4, 16, 64)  # of what whole execution takes: for strips
PLACES: tuple[Maps, ...] = ("device", "host")
PAGES = 20 * 2**20  # bytes that an allocator may hold beside what else is there


def survey(
    module: nn.Module,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    whole: int,
    beside: int,
    outside: int,
    *,
    expandable: bool = True,
) -> list[Way]:
    """Ways of `module.method(*args, **kwargs)`, one item of a batch at a time; none where it is not taken apart.

    It takes `whole` bytes as it is, `beside` more are there all along, and `outside` bytes before or after. Segments of
    the allocator grow if it is `expandable`.
    """
    first, *others = args
    count = len(first)
    alone = lambda x: x[:1] if isinstance(x, torch.Tensor) and x.ndim and len(x) == count else x  # noqa: E731
    leaves, form = tree_flatten(tree_map(alone, (tuple(others), kwargs)))  # as a call has them: its program is kept
    try:
        program, mark, _ = program_of(module, type(module), method, first[:1], leaves, form)
    except NotTakenApart:
        return []
    items = (count - 1) * sum(program.nodes[index].bytes for index in program.outputs)
    homes = _homes_of(module)
    ways = []
    with ExitStack() as undo:
        trials = Trials(undo)
        for share in SHARES:
            for maps in PLACES:
                strips = max(whole // share, 1)
                course = Strips(program, strips, maps, mark, moves=True).course
                if maps == "host" and not course.in_host:
                    continue
                room = max(beside + items + course.room(expandable=expandable), outside) + PAGES
                legs = tuple(legs_of(course, trials, homes))
                ways.append(Way(strips=strips, maps=maps, room=room, host=course.peak.host, items=count, legs=legs))
    return ways


def _homes_of(module: nn.Module) -> dict[str, str]:
    """The leaf that each module is of, by paths."""
    leaves = {id(part): leaf for leaf, parts in find_leaves(module).items() for part in parts}
    return {path: leaves[id(part)] for path, part in module.named_modules() if id(part) in leaves}
