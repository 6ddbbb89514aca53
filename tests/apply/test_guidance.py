"""A step's two calls as one: where they are foreseen, the same numbers; where not, what was asked for all the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from inspection import imprint, relative_error
from more_pipelines import MORE_CASES
from tightfit import fit
from tightfit.apply.activations.cfg_batching import batch_cfg_calls
from tightfit.apply.activations.outputs import are_equal
from tightfit.apply.method_overrides import override_class_members
from tiny_pipelines import CASES, TinyCase

ROUNDING = 1e-5  # relative, float32
STEPS = 4
QUICK = {"num_inference_steps": STEPS, "height": 32, "width": 32, "output_type": "latent"}


def named(name: str) -> TinyCase:
    return next(case for case in (*CASES, *MORE_CASES) if case.name == name)


def watched(network: nn.Module, around: Callable[..., Any]) -> list[int]:
    """Puts `around` around calls of `network`; returns how many items each of its passes to come has."""
    seen: list[int] = []
    plain = type(network).__call__

    def watching(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(args[0] if args else kwargs["hidden_states"]))
        return plain(self, *args, **kwargs)

    override_class_members(network, __call__=around(watching))
    return seen


def latents(pipe: Any, case: TinyCase) -> torch.Tensor:
    made: torch.Tensor = pipe(**{**case.call(), **QUICK})[0]
    return made


@pytest.mark.parametrize("name", ["Flux", "Wan"])
def test_two_calls_of_a_step_are_one_from_the_second_step_on(name: str) -> None:
    case, notes = named(name), list[str]()
    pipe: Any = case.make()
    apart, before = latents(pipe, case), imprint(pipe)
    seen = watched(pipe.transformer, lambda forward: batch_cfg_calls(forward, notes.append))
    for _ in range(2):  # each call has prompts of its own
        seen.clear()
        assert relative_error(latents(pipe, case), apart) <= ROUNDING
        assert seen == [1, 1, 2] + [2] * (STEPS - 1)
    assert notes == []
    assert imprint(pipe).attributes == before.attributes


def test_weights_come_once_for_both() -> None:
    case, moved = named("Wan"), []
    for around in (lambda forward: forward, batch_cfg_calls):
        pipe: Any = case.make()
        fitted = fit(pipe, level=3, device="loopback", count_activations=False)
        watched(pipe.transformer, around)
        latents(pipe, case)
        latents(pipe, case)
        moved.append(next(p.bytes_in for p in fitted.report().trace.phases if p.name == "denoise"))
    assert moved[1] < 0.8 * moved[0]  # 6 passes of 8; the more steps, the nearer to half


def test_prompts_of_different_lengths_are_computed_apart() -> None:
    case, notes = named("QwenImage"), list[str]()
    pipe: Any = case.make()
    apart = latents(pipe, case)
    seen = watched(pipe.transformer, lambda forward: batch_cfg_calls(forward, notes.append))
    assert torch.equal(latents(pipe, case), apart)
    assert seen == [1] * 2 * STEPS
    assert set(notes) == {"cfg: the two calls of a step take prompts of different sizes, and are made one by one"}


class Denoiser(nn.Module):
    """Mixes latents and a prompt, and may be told to do so differently."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = False
        self.eval()

    def forward(self, hidden_states: torch.Tensor, prompt: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        mixed = hidden_states * timestep.view(-1, 1, 1) + prompt
        return mixed.sin() if self.changed else mixed.cos()


class Step:
    """A step's latents and time, and the prompts that all steps share."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.prompts = torch.randn(2, 3, 40, 50)
        self.first, self.second = self.prompts[0].clone(), self.prompts[1].clone()
        self.network, self.plain = Denoiser(), Denoiser()
        self.notes: list[str] = []
        self.seen = watched(self.network, lambda forward: batch_cfg_calls(forward, self.notes.append))
        for _ in range(2):
            self.begin()
            self.ask(self.first)
            self.ask(self.second)
        assert self.seen == [3, 3, 6, 6]
        self.begin()
        self.ask(self.first)  # and the second is foreseen
        self.seen.clear()

    def begin(self) -> None:
        self.latents, self.time = torch.randn(3, 40, 50), torch.rand(3)

    def ask(self, prompt: torch.Tensor) -> None:
        """Asks for what the plain network would give, and looks whether that came."""
        wanted = self.plain(self.latents, prompt, self.time)
        self.given = self.network(hidden_states=self.latents, prompt=prompt, timestep=self.time.clone())
        assert relative_error(self.given, wanted) <= ROUNDING


def test_what_is_foreseen_is_not_computed_again() -> None:
    step = Step()
    step.ask(step.second)
    assert step.seen == []


def other_prompt(step: Step) -> None:
    step.second = torch.randn(3, 40, 50)


def same_values(step: Step) -> None:
    step.second = step.second.clone()


def changed_prompt(step: Step) -> None:
    step.second += 1


def changed_latents(step: Step) -> None:
    step.latents += 1


def other_latents(step: Step) -> None:
    step.latents = torch.randn(3, 40, 50)


def other_time(step: Step) -> None:
    step.time = torch.rand(3)


def the_first_again(step: Step) -> None:
    step.second = step.first


CHANGES = (other_prompt, same_values, changed_prompt, changed_latents, other_latents, other_time, the_first_again)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_not_foreseen_is_computed(change: Callable[[Step], None]) -> None:
    step = Step()
    change(step)
    step.ask(step.second)
    assert step.seen[0] == 3
    for _ in range(3):
        step.begin()
        step.ask(step.first)
        step.ask(step.second)


def test_a_network_that_is_changed_between_the_two_calls_is_never_joined() -> None:
    step = Step()
    for _ in range(4):  # with other prompts, as in another call
        step.begin()
        step.first, step.second = step.first.clone(), step.second.clone()
        for _ in range(3):
            step.network.changed = step.plain.changed = False
            step.ask(step.first)
            step.network.changed = step.plain.changed = True
            step.ask(step.second)
            step.begin()
    assert any("gave other numbers as one" in note for note in step.notes)


def test_without_guidance_nothing_is_computed_twice() -> None:
    network = Denoiser()
    seen, prompt = watched(network, batch_cfg_calls), torch.randn(3, 40, 50)
    for _ in range(4):
        network(hidden_states=torch.randn(3, 40, 50), prompt=prompt, timestep=torch.rand(3))
    assert seen == [3] * 4


def test_large_tensors_are_not_kept_alive() -> None:
    step = Step()
    step.ask(step.second)
    ghosts = [weakref.ref(step.first), weakref.ref(step.second), weakref.ref(step.latents)]
    del step.first, step.second, step.latents
    assert all(ghost() is None for ghost in ghosts)


@pytest.mark.parametrize(
    ("name", "guidance", "sizes"),
    [("StableDiffusion", "sequential", [4] * STEPS), ("Wan", "batched", [1] * 2 * STEPS)],
)
def test_hooks_of_the_owner_see_each_call_as_the_pipeline_makes_it(name: str, guidance: str, sizes: list[int]) -> None:
    case, seen = named(name), list[int]()
    pipe: Any = case.make()
    part = "unet" if hasattr(pipe, "unet") else "transformer"

    def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(len(args[0] if args else kwargs["hidden_states"]))

    fitted = fit(pipe, plan={"level": 0, "components": {part: {"cfg": guidance}}}, device="loopback")
    getattr(pipe, part).register_forward_pre_hook(watch, with_kwargs=True)
    latents(pipe, case)
    fitted.undo()
    assert seen == sizes


def test_in_each_step_only_what_is_made_anew_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card the host waits for each comparison: Flux makes its timestep anew, and keeps its tables of positions."""
    compared = list[tuple[int, ...]]()

    def counted(one: torch.Tensor, other: torch.Tensor) -> bool:
        compared.append(tuple(one.shape))
        return are_equal(one, other)

    monkeypatch.setattr("tightfit.apply.activations.cfg_batching.are_equal", counted)
    case = named("Flux")
    pipe: Any = case.make()
    watched(pipe.transformer, batch_cfg_calls)
    latents(pipe, case)
    assert compared[-STEPS + 2 :] == [(1,)] * (STEPS - 2)


def test_prompts_of_different_sizes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.apply.activations.cfg_batching.are_equal", lambda *_: pytest.fail("compared"))
    case, notes = named("QwenImage"), list[str]()
    pipe: Any = case.make()
    watched(pipe.transformer, lambda forward: batch_cfg_calls(forward, notes.append))
    latents(pipe, case)
    assert {"prompts of different sizes" in note for note in notes} == {True}
