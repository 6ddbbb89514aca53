"""A request becomes the pipeline's arguments, or one line that says what would do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tightfit import Fitted, Request, RequestError
from tightfit.run import call_arguments as module
from tightfit.run.call_arguments import Prompt, call_arguments, size_multiple
from tightfit.run.generate import generate
from tiny_pipelines import CASES

# latents of 4 pixels, here and there of 8, times the denoiser's patches
MULTIPLES = {"StableDiffusion": 4, "StableDiffusionXL": 4, "StableDiffusion3": 8, "Flux": 8, "Wan": 8, "LTX": 4}

FOX = Prompt("a red fox", seed=7)


class Plain:
    """A pipeline that takes next to nothing."""

    def __call__(self, prompt: str, height: int = 64, generator: object = None) -> None: ...


# the prompt


@pytest.mark.parametrize("text", ["", "  ", "\n\t"])
def test_an_empty_prompt_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="the prompt is empty: say what to draw"):
        Prompt(text, seed=0)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(RequestError, match=f"the seed must be between 0 and .*, not {seed}") as caught:
        Prompt("a fox", seed)
    assert caught.value.facts == {"seed": seed}


# sizes


@pytest.mark.parametrize("case", [case for case in CASES if case.name in MULTIPLES], ids=lambda case: case.name)
def test_how_many_pixels_a_side_must_be_a_multiple_of(case: Any) -> None:
    assert size_multiple(case.make()) == MULTIPLES[case.name]


@pytest.mark.parametrize(
    ("side", "pixels", "near"), [("height", 66, "64 or 68"), ("width", 63, "60 or 64"), ("height", 2, "4")]
)
def test_a_size_that_does_not_fit_names_itself_the_multiple_and_its_neighbours(
    pipe: Any, side: str, pixels: int, near: str
) -> None:
    with pytest.raises(RequestError) as caught:
        call_arguments(pipe, FOX, Request(**{side: pixels}))
    assert str(caught.value) == f"{side} {pixels} is not a multiple of 4, as this model needs: {near} would do"
    assert caught.value.facts == {side: pixels, "multiple": 4}


@pytest.mark.parametrize(
    "asked", [{"height": 4 * 10**6, "width": 4 * 10**6}, {"height": 4 * 10**9}, {"width": 64, "batch": 10**9}]
)
def test_an_impossible_size_is_refused_with_the_bytes(pipe: Any, asked: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=r"the pictures alone would take [\d.e+]+ .iB, and RAM has .*: ask for less"):
        call_arguments(pipe, FOX, Request(**asked))


def test_what_is_possible_depends_on_this_machine(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call_arguments(pipe, FOX, Request(height=64, width=64))
    monkeypatch.setattr(module, "ram_bytes", lambda: 64 * 64 * 12 - 1)
    with pytest.raises(RequestError) as caught:
        call_arguments(pipe, FOX, Request(height=64, width=64))
    assert caught.value.facts == {"needed_bytes": 64 * 64 * 12, "ram_bytes": 64 * 64 * 12 - 1}


@pytest.mark.parametrize("steps", [0, -3])
def test_steps_are_at_least_one(steps: int) -> None:
    with pytest.raises(RequestError, match=f"steps must be greater than 0, not {steps}"):
        Request(steps=steps)


def test_more_steps_than_the_scheduler_has_are_refused(pipe: Any, fitted: Fitted) -> None:
    with pytest.raises(RequestError, match="2000 cannot be larger than"):
        generate(pipe, fitted, FOX, Request(height=64, width=64, steps=2000))


def test_what_the_pipeline_itself_refuses_is_refused(pipe: Any, fitted: Fitted) -> None:
    with pytest.raises(RequestError, match="divisible by 8 but are 60 and 64"):
        generate(pipe, fitted, FOX, Request(height=60, width=64, steps=1))


# what a pipeline takes


@pytest.mark.parametrize(
    ("asked", "what"),
    [({"frames": 9}, "frames"), ({"steps": 2}, "steps"), ({"guidance": 2.0}, "guidance"), ({"width": 8}, "width")],
)
def test_what_a_pipeline_does_not_take_is_named_as_it_was_asked_for(asked: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=f"^Plain takes no {what}$"):
        call_arguments(Plain(), FOX, Request(**asked))


def test_neither_batches_nor_negative_prompts_are_taken_by_all() -> None:
    with pytest.raises(RequestError, match=r"^Plain takes no batch$"):
        call_arguments(Plain(), FOX, Request(batch=2))
    with pytest.raises(RequestError, match=r"^Plain takes no negative prompt$"):
        call_arguments(Plain(), Prompt("a fox", 0, "snow"), Request())


def test_only_what_was_asked_for_is_passed_on(pipe: Any) -> None:
    assert set(call_arguments(pipe, FOX, Request())) == {"prompt", "generator"}
    asked = Request(height=64, width=68, steps=3, guidance=0.0, batch=2)
    arguments = call_arguments(pipe, Prompt("a red fox", 7, "snow"), asked)
    generators = arguments.pop("generator")
    assert [generator.initial_seed() for generator in generators] == [7, 8]
    assert arguments == {
        "prompt": "a red fox",
        "negative_prompt": "snow",
        "height": 64,
        "width": 68,
        "num_inference_steps": 3,
        "guidance_scale": 0.0,
        "num_images_per_prompt": 2,
    }


def test_videos_come_in_batches_too() -> None:
    def call(self: Any, prompt: str, num_frames: int, num_videos_per_prompt: int, generator: Any) -> None: ...

    pipe = type("Filmer", (SimpleNamespace,), {"__call__": call})()
    arguments = call_arguments(pipe, FOX, Request(frames=9, batch=2))
    assert (arguments["num_frames"], arguments["num_videos_per_prompt"]) == (9, 2)


# seeds


def test_each_picture_of_a_batch_is_that_of_its_own_seed(pipe: Any, fitted: Fitted) -> None:
    size = {"height": 64, "width": 64, "steps": 2}
    together = generate(pipe, fitted, Prompt("a red fox", seed=7), Request(**size, batch=3)).pictures
    assert len({picture.tobytes() for picture in together}) == 3
    for index, picture in enumerate(together):
        alone = generate(pipe, fitted, Prompt("a red fox", seed=7 + index), Request(**size)).pictures[0]
        difference = np.abs(np.asarray(picture, dtype=int) - np.asarray(alone, dtype=int))
        assert difference.max() <= 1  # a batch's sums may be done in another order
