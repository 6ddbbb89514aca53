"""Cards that are there and that torch cannot use: what is said of them, and what is chosen instead.

CUDA's answers are played here, with the sentences that torch 2.12 raises; tests/gpu/test_unusable_cards.py asks torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from tightfit.devices import choose as choice
from tightfit.devices.choose import choose_device
from tightfit.devices.cuda_support import unusable_card, usable_cards
from tightfit.errors import InputError

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
BUILT = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120", "compute_120"]
Cards = Callable[..., None]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Plays a torch for CUDA 13.0: with cards of these capabilities, or whose start fails with `refusal`."""

    def play(*capabilities: tuple[int, int], refusal: str = "") -> None:
        def init() -> None:
            if refusal:
                raise RuntimeError(refusal)

        played = {
            "is_available": lambda: bool(capabilities),
            "device_count": lambda: len(capabilities),
            "get_device_capability": lambda index: capabilities[index],
            "get_device_name": lambda index: f"Card {index}",
            "get_arch_list": lambda: BUILT,
            "init": init,
        }
        for name, answer in played.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    monkeypatch.setattr(choice, "_told", set())
    return play


@pytest.mark.parametrize("refusal", [NO_DRIVER, "No CUDA GPUs are available"])
def test_where_there_is_no_card_nothing_is_said(cards: Cards, refusal: str, caplog: pytest.LogCaptureFixture) -> None:
    cards(refusal=refusal)
    assert unusable_card() is None
    assert choose_device().kind == "cpu"
    assert choose_device("cuda,loopback").name == "loopback"
    assert not caplog.records


def test_a_torch_without_cuda_says_nothing_of_cards(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(refusal="Torch not compiled with CUDA enabled")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert unusable_card() is None


def test_a_driver_that_is_too_old_is_named_with_what_to_do(cards: Cards, caplog: pytest.LogCaptureFixture) -> None:
    cards(refusal=TOO_OLD)
    with caplog.at_level(logging.WARNING, "tightfit"):
        assert choose_device("cuda,loopback").name == "loopback"
        assert choose_device().kind == "cpu"
    [said] = caplog.messages  # once
    assert said.startswith("running without a card: the NVIDIA driver is too old for torch ")
    assert "supports CUDA 12.4, torch needs 13.0. Update the driver, or install torch for CUDA 12.4" in said
    with pytest.raises(InputError, match="no such device: cuda; this computer has 0 CUDA cards; the NVIDIA driver is"):
        choose_device("cuda")


def test_another_reason_of_the_driver_is_given_as_it_is(cards: Cards) -> None:
    cards(refusal="Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted\nmore")
    said = unusable_card() or ""
    assert said.endswith("Error 804: forward compatibility was attempted")


@pytest.mark.parametrize("capability", [(6, 1), (3, 7), (7, 0), (11, 0)])
def test_a_card_without_kernels_is_named_with_what_to_do(
    cards: Cards, capability: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    cards(capability)
    with caplog.at_level(logging.WARNING, "tightfit"):
        assert choose_device().kind == "cpu"
    [said] = caplog.messages
    assert f"has no kernels for Card 0, which has compute capability {capability[0]}.{capability[1]}" in said
    assert "only for 7.5, 8.0, 8.6, 9.0, 10.0, 12.0" in said
    assert "https://pytorch.org" in said
    with pytest.raises(InputError, match="no kernels for Card 0"):
        choose_device("cuda:0")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 1), (13, 0)])
def test_a_card_with_kernels_is_chosen(cards: Cards, capability: tuple[int, int]) -> None:
    cards(capability)
    assert unusable_card() is None
    assert choose_device("cuda,loopback").name == "cuda:0"


def test_of_two_cards_the_one_with_kernels_is_chosen(cards: Cards) -> None:
    cards((6, 1), (8, 9))
    assert usable_cards() == (1,)
    assert choose_device().name == choose_device("cuda").name == "cuda:1"
    assert unusable_card() is None
    with pytest.raises(InputError, match="no such device: cuda:0; this computer has 1 CUDA cards"):
        choose_device("cuda:0")


@pytest.mark.parametrize("name", ["cudo,loopback", "cuda,loopbakc", "loopbakc,cpu"])
def test_of_several_names_each_must_be_known_as_far_as_it_is_read(cards: Cards, name: str) -> None:
    cards(refusal=NO_DRIVER)
    with pytest.raises(InputError, match="unknown device"):
        choose_device(name)
