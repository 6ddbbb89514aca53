"""In how many groups ranks compute, and by which attention: by predicted time, and with the reasons for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tightfit.errors import BudgetTooSmall
from tightfit.schema.footprint import ComponentCall, Footprint
from tightfit.schema.machine import EXCHANGES, KernelGroup
from tightfit.schema.plan import ContextAttention, Plan, Reason
from tightfit.schema.rank_option import AUTOENCODERS_AT_ONCE, AutoencoderSharing, RankOption
from tightfit.units import format_bytes, format_seconds

__all__ = [
    "exchange_reason",
    "exchanged_bytes",
    "exchanges_of",
    "fastest_by_groups",
    "option_reasons",
    "options_to_try",
    "shared_weights_reason",
    "shares_reason",
    "sharing_autoencoders",
]

T = TypeVar("T")
NAMES: Mapping[ContextAttention, str] = {"gathered": "gathered keys", "ring": "a ring", "heads": "heads"}
GROUP_NAMES = {1: "one group", 2: "two groups"}
AUTOENCODER_PHASES = ("encode inputs", "decode")
STRIP_PART = 16  # strips of a rank's rows may take 1/16 of the bytes that are needed with all of them at once


def options_to_try(options: Sequence[RankOption], seconds: Mapping[RankOption, float]) -> list[RankOption]:
    """Return those of `options` that are to be predicted next, all with one number of groups; [] if none is left.

    `seconds` are predicted of earlier ones, infinite where they do not fit: of more groups, only the kind of attention
    is tried that was the fastest with fewer.
    """
    left = [each for each in options if each.cfg_groups not in {tried.cfg_groups for tried in seconds}]
    left = [each for each in left if each.cfg_groups == left[0].cfg_groups]
    fitting = [each for each in seconds if seconds[each] < math.inf]
    best = min(fitting, key=lambda each: seconds[each]).context_attention if fitting else None
    return [each for each in left if each.context_attention == best] or left


def fastest_by_groups(seconds: Mapping[RankOption, float]) -> dict[int, RankOption]:
    """Return the option with the least predicted `seconds` of each number of groups with which the call fits."""
    found: dict[int, RankOption] = {}
    for option in sorted((each for each in seconds if seconds[each] < math.inf), key=seconds.__getitem__):
        found.setdefault(option.cfg_groups, option)
    return found


def option_reasons(
    option: RankOption, seconds: Mapping[RankOption, float], ranks: int, by_groups: Mapping[int, float] | None = None
) -> list[Reason]:
    """Return why `option` of so many `ranks` was taken: it has the least predicted `seconds` (infinite: too large).

    `by_groups` are the seconds by number of groups where these are others, by shares that the ranks then have.
    """
    groups = by_groups or {count: seconds[each] for count, each in fastest_by_groups(seconds).items()}
    ways = {each.context_attention: its for each, its in seconds.items() if each.cfg_groups == 1}
    found = []
    if len({each.cfg_groups for each in seconds}) > 1:
        each_one = ", one for each guidance prediction" * (option.cfg_groups > 1)
        decision = f"ranks in {GROUP_NAMES[option.cfg_groups]}{each_one}"
        found.append(Reason(decision=decision, because=_because(GROUP_NAMES, option.cfg_groups, groups)))
    if len(ways) > 1 and ranks > option.cfg_groups and ways[option.context_attention] < math.inf:
        decision = f"attention of ranks by {NAMES[option.context_attention]}"
        found.append(Reason(decision=decision, because=_because(NAMES, option.context_attention, ways)))
    return found


def _because(names: Mapping[Any, str], chosen: Any, seconds: Mapping[Any, float]) -> str:
    others = [
        f"{names[each]} {format_seconds(its)}" for each, its in seconds.items() if each != chosen and its < math.inf
    ]
    if not others:
        return "in no other way does the call fit on all ranks"
    return f"predicted are {format_seconds(seconds[chosen])}; with " + " and ".join(others)


def shares_reason(shares: Sequence[float], by_speed: float, equal: float) -> Reason:
    """Return why ranks have `shares` of the rows: the slowest needs `by_speed` seconds, and `equal` with equal ones."""
    said = " : ".join(f"{share:g}" for share in shares)
    because = f"the slowest rank then needs {format_seconds(by_speed)}, and {format_seconds(equal)} with equal shares"
    return Reason(decision=f"ranks share the rows as {said}", because=because)


def sharing_autoencoders(
    attempt: Callable[[AutoencoderSharing], T], asked: AutoencoderSharing = AUTOENCODERS_AT_ONCE
) -> tuple[T, list[Reason]]:
    """Return what `attempt` returns with the first way of sharing autoencoders that fits, and why not an earlier one.

    Each rank computes its rows at once; else in strips; else all rows, in strips if that is planned. Another way than
    the first one that is `asked` for is the only one. `attempt` raises BudgetTooSmall where a way does not fit.
    """
    if asked != AUTOENCODERS_AT_ONCE:
        return attempt(asked), []
    refusals = list[BudgetTooSmall]()
    for way in _ways_to_share(refusals):
        try:
            found = attempt(way)
        except BudgetTooSmall as error:
            refusals.append(error)
        else:
            return found, _sharing_reasons(way, refusals)
    raise min(refusals, key=_needed)


def _needed(refusal: BudgetTooSmall) -> float:
    needed = refusal.facts.get("needed_bytes")
    return needed if isinstance(needed, int) else math.inf


def _ways_to_share(refusals: Sequence[BudgetTooSmall]) -> Iterator[AutoencoderSharing]:
    """Yield the ways in which ranks may share autoencoders; `refusals` has those of the ways yielded before.

    Rows of clips are not tried in strips: most of their graphs are too long for it, and each way is measured anew.
    """
    yield AUTOENCODERS_AT_ONCE
    needed = _needed(refusals[0])
    facts = refusals[0].facts
    if facts.get("phase") in AUTOENCODER_PHASES and not facts.get("frames") and needed < math.inf:
        yield AutoencoderSharing(strips=max(int(needed) // STRIP_PART, 1))
    yield AutoencoderSharing(shared=False)


def _sharing_reasons(way: AutoencoderSharing, refusals: Sequence[BudgetTooSmall]) -> list[Reason]:
    """Return why autoencoders are shared in that `way`: earlier ones met with `refusals`."""
    if not refusals:
        return []
    if way.strips is None:
        decision, because = "autoencoders run on every rank", f"with their rows shared, {refusals[-1]}"
    else:
        decision = f"each rank computes its rows of autoencoders in strips within {format_bytes(way.strips)}"
        because = f"with all of its rows at once, {refusals[-1]}"
    return [Reason(decision=decision, because=because)]


def shared_weights_reason(plan: Plan, ranks: int) -> Reason | None:
    """Return why a rank counts a part of its weights in host memory, of which `ranks` share one copy; None: no part."""
    names = [name for name, each in plan.components.items() if each.store.is_host_memory]
    names = [name for name in names if plan.components[name].placement != "resident"]
    if ranks == 1 or not names:
        return None
    because = f"{ranks} ranks of this computer can map the same memory; each counts 1/{ranks} of it as its RAM"
    return Reason(decision=f"one copy in host memory of {', '.join(names)}", because=because)


def exchange_reason(footprint: Footprint, per_node: int | None = None) -> Reason:
    """Return what a rank sends to the others in a call; `per_node` ranks are on a computer (None: all)."""
    count = sum(group.kernels * call.runs for call in _calls(footprint) for group in exchanges_of(call))
    because = f"a call exchanges them with other ranks in {count:,} exchanges, counted in its predicted time"
    return Reason(decision=f"{format_bytes(exchanged_bytes(footprint, per_node))} are sent", because=because)


def exchanged_bytes(footprint: Footprint, per_node: int | None = None) -> int:
    """Return the bytes that a rank sends to others in a call; `per_node` ranks are on a computer (None: all)."""
    cards = {"network": per_node or 1}  # a link's traffic is that of all cards of a computer
    groups = ((group, call.runs) for call in _calls(footprint) for group in exchanges_of(call))
    return sum(group.traffic // cards.get(group.kind, 1) * runs for group, runs in groups)


def exchanges_of(call: ComponentCall) -> list[KernelGroup]:
    """Return the exchanges of one of a footprint's component calls."""
    return [group for use in call.block_uses for group in use.work if group.kind in EXCHANGES]


def _calls(footprint: Footprint) -> Iterator[ComponentCall]:
    return (call for phase in footprint.phases for call in phase.calls)
