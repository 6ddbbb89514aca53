"""Long clips by the exports of short ones: the program is that of exporting all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tightfit.apply.activations.exporting import without_weights
from tightfit.apply.activations.strips import export_graph as capturing
from tightfit.apply.activations.strips.export_graph import capture
from tightfit.apply.activations.strips.long_clips import short_lengths
from tightfit.apply.activations.strips.program import Program
from tiny_autoencoders import CASES


def decoding(double: Any, latents: torch.Tensor) -> list[torch.Tensor]:
    return [double.decode(latents, return_dict=False)[0]]


def encoding(double: Any, pixels: torch.Tensor) -> list[torch.Tensor]:
    return [double.encode(pixels).latent_dist.parameters]


class Walk(nn.Module):
    """Goes through a clip frame by frame, each with what is left of the one before."""

    def __init__(self, extra: Callable[[int], bool] = lambda _: False, put: str = "all at once") -> None:
        super().__init__()
        self.conv, self.extra, self.put = nn.Conv2d(3, 3, 3, padding=1), extra, put

    def decode(self, x: torch.Tensor, return_dict: bool = True) -> tuple[torch.Tensor]:
        left, made = torch.zeros_like(x[:, :, 0]), x[:, :, :0]
        frames = []
        for index in range(x.shape[2]):
            left = self.conv(x[:, :, index]) + left * 0.5
            if self.extra(index):
                left = left.relu()
            frames.append(left[:, :, None])
            made = torch.cat((made, frames[-1]), 2) if self.put == "one by one" else made
        return (made if self.put == "one by one" else torch.cat(frames, 2),)


class Exports:
    """Counts the frames of what is exported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: list[int] = []
        original = capturing.export

        def counted(module: Any, inputs: Any, *rest: Any, **others: Any) -> Any:
            self.frames.append(inputs[0].shape[2])
            return original(module, inputs, *rest, **others)

        monkeypatch.setattr(capturing, "export", counted)


def both(model: nn.Module, call: Any, clip: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Program, Program]:
    """The program by short clips, and that of exporting the whole clip."""
    double = without_weights(model)
    found = capture(double, call, [clip])
    with monkeypatch.context() as patch:
        patch.setattr(capturing, "_long_clip", lambda *_: None)
        return found, capture(double, call, [clip])


@pytest.mark.parametrize("put", ["all at once", "one by one"])
def test_a_walk_through_frames_goes_on(put: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exports = Exports(monkeypatch)
    found, whole = both(Walk(put=put), decoding, torch.empty(1, 3, 30, 8, 8, device="meta"), monkeypatch)
    assert exports.frames == [4, 4, 5, 30, 30]
    assert found == whole


def test_a_walk_in_steps_of_two_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    exports = Exports(monkeypatch)
    walk = Walk(lambda index: index % 2 == 1)
    found, whole = both(walk, decoding, torch.empty(1, 3, 31, 8, 8, device="meta"), monkeypatch)
    assert exports.frames == [7, 7, 9, 31, 31]
    assert found == whole


def test_what_changes_on_the_way_is_exported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in (lambda index: index == 20, lambda index: index > 20, lambda index: index % 3 == 0):
        exports = Exports(monkeypatch)
        found, whole = both(Walk(extra), decoding, torch.empty(1, 3, 30, 8, 8, device="meta"), monkeypatch)
        assert exports.frames[-4:] == [30] * 4
        assert found == whole


class Weighted(Walk):
    """Looks each frame's weight up in a table that is made for the whole clip."""

    def decode(self, x: torch.Tensor, return_dict: bool = True) -> tuple[torch.Tensor]:
        table = torch.tensor([[frame / x.shape[2] for frame in range(x.shape[2])]])
        return (super().decode(x)[0] * table.to(x.device)[:, None, :, None, None],)


def test_tables_of_short_clips_are_not_those_of_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    exports = Exports(monkeypatch)
    found, whole = both(Weighted(), decoding, torch.empty(1, 3, 30, 8, 8, device="meta"), monkeypatch)
    assert exports.frames[-4:] == [30] * 4
    assert found.nodes == whole.nodes


def test_short_lengths_are_a_step_apart() -> None:
    assert short_lengths(21, lambda frames: 7 + 3 * frames) == (4, 5)
    assert short_lengths(81, lambda frames: 5 + 2 * ((frames - 1) // 4)) == (13, 17)
    assert short_lengths(49, lambda _: 12) is None  # all frames at once
    assert short_lengths(9, lambda frames: frames) is None  # too short to gain by it
    assert short_lengths(49, lambda frames: frames * frames) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call", "shape"),
    [
        ("AutoencoderKLWan", decoding, (11, 6, 5)),
        ("AutoencoderKLWan", encoding, (41, 48, 40)),
        ("AutoencoderKLWan of 2.2", decoding, (11, 6, 5)),
        ("AutoencoderKLCogVideoX", decoding, (19, 6, 6)),
        ("AutoencoderKLQwenImage", decoding, (11, 6, 5)),
    ],
)
def test_long_clips_of_autoencoders(name: str, call: Any, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == name)
    channels = (case.latents if call is decoding else case.pixels)(4, 1).shape[1]
    exports = Exports(monkeypatch)
    found, whole = both(case.make(), call, torch.empty(1, channels, *shape, device="meta"), monkeypatch)
    assert max(exports.frames[:3]) < shape[0] / 2
    assert found == whole
