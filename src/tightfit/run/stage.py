"""Where calls are tried out: a pipeline without weights on a pretend card, with a request to play.

The unmodified pipeline follows a plan by the same engine as anywhere else. Its denoiser works a few times for every
shape of input it is given; from then on it only lets the time pass that this took.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tightfit.apply.fitting import fit
from tightfit.catalog.known import known_model
from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.loading import quietly
from tightfit.checkpoint.shapes import build_folder
from tightfit.measure.building import build_known
from tightfit.measure.logged import PassLog
from tightfit.measure.modules import find_components, find_role
from tightfit.measure.repeated import Repeater
from tightfit.measure.shadow import PROMPT
from tightfit.pretend.backend import cards_in_use, use_cards
from tightfit.pretend.card import SimulatedCard
from tightfit.pretend.clock import Host
from tightfit.pretend.operations import NAME
from tightfit.records import Accelerator, Plan, Request
from tightfit.run.arguments import Given
from tightfit.run.models import stored_dtype
from tightfit.run.remembering import PassReplayer
from tightfit.run.request import NAMES, Prompt, call_arguments
from tightfit.run.stand_ins import dummy_inputs

__all__ = ["Inputs", "SimulationRun", "roomy_card", "roomy_cards"]

Inputs = Mapping[str, Any] | Given | PassLog | None  # of a call: further arguments, all of them, or what it did

# in remarks about the stand-in for a prompt, and about what the pipeline itself does (SDXL widens its autoencoder)
_EXPECTED = ("deprecated", "truncated", "should be kept in float32")
ROOM = 2**60  # bytes: what is tried out never runs out


@contextlib.contextmanager
def roomy_card(like: Accelerator) -> Iterator[SimulatedCard]:
    """A pretend card like `like`, with memory without end, in use as "pretend:0" meanwhile."""
    with roomy_cards([like]) as (card,):
        yield card


@contextlib.contextmanager
def roomy_cards(likes: Sequence[Accelerator]) -> Iterator[list[SimulatedCard]]:
    """The same of several in one computer, from "pretend:0" on."""
    before, host = cards_in_use(), Host()
    cards = [SimulatedCard(index, like.model_copy(update={"bytes": ROOM}), host) for index, like in enumerate(likes)]
    use_cards(cards)
    try:
        yield cards
    finally:
        use_cards(before)


class SimulationRun:
    """A pipeline without weights that follows a plan on `card`, and on others in use where the plan says so.

    `model` is a known one's name or a checked folder, both computed in `dtype`, or a live pipeline's shadow; what
    `asked` leaves open is a known model's usual request, or the pipeline's own defaults. InputError for unknown names,
    ModelError for a folder that makes no pipeline, RequestError and PlanError for what is illegal.
    """

    def __init__(
        self,
        model: Any,
        card: SimulatedCard,
        choices: Plan | dict[str, Any],
        asked: Request,
        dtype: torch.dtype | None = None,
        unable: Collection[tuple[str, str]] = (),
    ) -> None:
        """`unable`: components and methods that cannot work on shapes, see `Repeater`."""
        # on a CPU, what is loaded is computed in float32, as `tightfit run` does
        self.pipe, usual = _without_weights(model, dtype or (torch.float32 if card.accelerator.is_cpu else None))
        self.card = card
        self.pipe.set_progress_bar_config(disable=True)
        self.request = _filled(self.pipe, asked, usual)
        self.components = find_components(self.pipe)
        self.fitted = fit(self.pipe, plan=choices, request=self.request, device=f"pretend:{card.index}")
        self._repeater = Repeater(self.components, self._device, unable)  # before anybody else takes a method's place
        self.denoisers: dict[str, PassReplayer] = {}
        for name, part in self.components.items():
            if find_role(name, part) == "denoiser":
                streams = self.fitted.plan.components[name].placement == "stream"
                part.forward = self.denoisers[name] = PassReplayer(part, self.fitted.recorder, card, streams=streams)

    def play(self, inputs: Inputs = None) -> tuple[str, ...]:
        """One call of the pipeline: with the request, and arguments of its own by name; one that is given; or one that
        was logged, of which the passes are repeated. Returns what diffusers remarks (a number that it rounds).
        """
        for memory in self.denoisers.values():
            memory.forget()
        with torch.no_grad(), quietly() as said, _draws_kept():
            if isinstance(inputs, Given):
                self.pipe(**_as_tensors(self.pipe, inputs.rehearsed(self._device)))
            elif isinstance(inputs, PassLog):
                for done in inputs.passes:
                    self._repeater.repeat(done)
            else:
                self._make_up(inputs or {})
        return tuple(dict.fromkeys(line for line in said if not any(word in line for word in _EXPECTED)))

    def _make_up(self, given: Mapping[str, Any]) -> None:
        pictures, left = dummy_inputs(self.pipe, self.request, given)
        arguments = call_arguments(self.pipe, Prompt(PROMPT, seed=0), left)
        self.pipe(**arguments | pictures | {"output_type": "pt"} | dict(given))

    def find_unable(self, log: PassLog) -> set[tuple[str, str]]:
        """What of a logged call cannot be repeated as a whole. Nothing can be played on this stage afterwards."""
        with torch.no_grad(), quietly(), _draws_kept():
            return self._repeater.find_unable(log)

    @property
    def _device(self) -> torch.device:
        return torch.device(NAME, self.card.index)


def _without_weights(model: Any, dtype: torch.dtype | None) -> tuple[Any, Request]:
    """The pipeline in `dtype` (None: as it is usually loaded), and what it is usually asked for."""
    if isinstance(model, ModelFolder):
        return build_folder(model, dtype or getattr(torch, stored_dtype(model.components))), Request()
    if isinstance(model, str):
        known = known_model(model)
        return build_known(known, dtype), known.request
    return model, Request()


def _as_tensors(pipe: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` of a call that gives tensors instead of pictures or arrays, whose numbers nobody knows."""
    taken = inspect.signature(type(pipe).__call__).parameters
    if "output_type" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        usual = taken["output_type"].default if "output_type" in taken else "pil"
        if arguments.get("output_type", usual) in ("pil", "np", "numpy"):
            arguments["output_type"] = "pt"
    return arguments


@contextlib.contextmanager
def _draws_kept() -> Iterator[None]:
    """Random generators of this process are where they were, afterwards."""
    others = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])


def _filled(pipe: Any, asked: Request, usual: Request) -> Request:
    """`asked` with the parts of a model's usual request that its pipeline takes, where it leaves them open."""
    taken = inspect.signature(type(pipe).__call__).parameters
    fields = {name: value for name, value in usual if value is not None and NAMES.get(name, name) in taken}
    arguments = {name: value for name, value in usual.arguments.items() if name in taken} | asked.arguments
    said = {name: value for name, value in asked if value is not None}
    return Request(**fields | said | {"arguments": arguments})
