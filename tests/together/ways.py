"""How a trial is run: the same script on an untouched pipeline and on one that is fitted, and what came of it.

A script gets a pipeline and `fit`, which makes it follow a plan (or, for the untouched one, does nothing), and returns
tensors: what it drew. On the simulated card the denoiser's weights are streamed, with their values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import tightfit
from diffusers_attention_backend import own_attention_backend
from simulator.conftest import ACCELERATOR
from tightfit.errors import TightfitError
from tightfit.measure.modules import find_components, find_role
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, PIXELS

MIB = 2**20
STEPS = 3
ROUNDING = 5e-6  # relative: of the simulated card, whose kernels add in another order than the CPU's
SD = next(case for case in CASES if case.name == "StableDiffusion")

Fit = Callable[..., Any]
Script = Callable[[Any, Fit], list[torch.Tensor]]


@dataclass(frozen=True)
class Way:
    """A way to fit a pipeline; `tolerance` is the largest relative error that is right."""

    name: str
    title: str
    fit: Fit
    tolerance: float
    scale: int = 1  # of the text encoders and the denoiser
    card: bool = False

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Make the simulated card available, where the way needs it."""
        if self.card:
            kind = ACCELERATOR.model_copy(update={"bytes": 512 * MIB})
            use_cards([SimulatedCard(0, kind, Host(), values="real", history=False)])
        try:
            yield
        finally:
            if self.card:
                use_cards([])


def _on_disk(pipe: Any, **more: Any) -> Any:
    parts = {
        name: {"placement": "stream" if find_role(name, part) == "denoiser" else "offload", "offload_to": "disk"}
        for name, part in find_components(pipe).items()
    }
    return tightfit.fit(pipe, plan={"components": parts}, device="loopback", **more)


LEVEL = Way("level", "level 3", functools.partial(tightfit.fit, level=3, device="simulated:0"), ROUNDING, card=True)
BUDGET = Way(
    "budget", "budget", functools.partial(tightfit.fit, budget=100 * MIB, device="simulated:0"), ROUNDING, 8, card=True
)
DISK = Way("disk", "weights on disk", _on_disk, 0)
WAYS = {way.name: way for way in (LEVEL, BUDGET, DISK)}


def made(scale: int = 1) -> Any:
    pipe: Any = SD.make(scale)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclass(frozen=True)
class Trial:
    """Something that is done beside tightfit. `refused`: what is said, by the name of the way, where it is refused."""

    name: str
    script: Script
    make: Callable[[int], Any] = made
    refused: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = tuple(WAYS)  # names of the ways in which it is tried
    tolerance: float = 0  # what is right beside the way's own: fused weights are rounded


def draw(pipe: Any, height: int = PIXELS, **more: Any) -> torch.Tensor:
    """One picture of a pipeline, or what `more` asks for."""
    usual = {"prompt": "a fox", "num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(4)}
    with torch.no_grad():
        found = pipe(**usual | {"height": height, "width": PIXELS, "output_type": "pt"} | more)
    pictures: torch.Tensor = found[0]
    return pictures.detach().cpu().clone()


def untouched(_: Any, **more: Any) -> Any:
    """The `fit` of an untouched pipeline: its handle does nothing."""
    return SimpleNamespace(undo=lambda: None, fitted=False)


@functools.cache
def wanted(script: Script, make: Callable[[int], Any], scale: int) -> list[torch.Tensor]:
    with own_attention_backend():
        return script(make(scale), untouched)


def _drawn(pipe: Any, fit: Fit) -> list[torch.Tensor]:
    return [draw(pipe)]


def outcome(trial: Trial, way: Way) -> str:
    """Say what became of `trial`: "right", what was said where it was refused, or what went wrong."""
    with way.ready():
        pipe, handles = trial.make(way.scale), list[Any]()

        def fit(each: Any, **more: Any) -> Any:
            handles.append(way.fit(each, **more))
            return handles[-1]

        try:
            with own_attention_backend():
                found = trial.script(pipe, fit)
                for handle in handles:
                    handle.undo()
        except TightfitError as error:
            for handle in handles:
                handle.undo()
            script = _drawn if handles else trial.script  # refused by `fit`: what was done before it is still done
            there, expected = draw(pipe), wanted(script, trial.make, way.scale)[0]
            assert _error(there, expected) <= way.tolerance, "what was refused has changed the pipeline"
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            return f"raw {type(error).__name__}: {str(error)[:300]}"
        expected = wanted(trial.script, trial.make, way.scale)
        assert len(found) == len(expected) > 0
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            error = _error(ours, theirs)
            if not error <= max(way.tolerance, trial.tolerance):
                return f"wrong: {error:.1e}, in result {index + 1} of {len(found)}"
        return "right"


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest error, relative to the largest value; NaN is one."""
    if ours.shape != theirs.shape or not theirs.isfinite().all():
        return float("inf")
    largest = theirs.abs().max().double().clamp(min=1e-30)
    return float((ours.double() - theirs.double()).abs().max() / largest)
