"""PSNR and SSIM of pictures, against scikit-image's."""

from __future__ import annotations

import math

import pytest
import torch

from tightfit.errors import InputError
from tightfit.measure.picture_difference import mean_psnr, picture_differences, psnr, ssim

# scikit-image 0.26.0, of the same pictures as [H, W, C] in float64:
#   peak_signal_noise_ratio(a, b, data_range=1)
#   structural_similarity(a, b, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1,
#                         channel_axis=-1)
OF_SCIKIT_IMAGE = {
    "shifted": (25.306354325865065, 0.9544277314763598),
    "noisy": (24.14197112287497, 0.6125180492202177),
    "16 levels": (34.3212411396665, 0.9345913629691864),
    "inverted": (5.633970895598846, -0.44563412256543367),
}

Y, X = torch.meshgrid(torch.arange(40), torch.arange(56), indexing="ij")


def wave(shift: float) -> torch.Tensor:
    """A picture [3, 40, 56], each channel with waves of its own."""
    x, y = X.double(), Y.double()
    channels = [
        0.5 + 0.5 * torch.sin(0.05 * (c + 1) * x + 0.11 * y + c + shift) * torch.cos(0.07 * x) for c in range(3)
    ]
    return torch.stack(channels)


def altered(name: str) -> torch.Tensor:
    pattern = 0.1 * ((X * 7 + Y * 13) % 11 - 5).double() / 5
    pictures = {
        "shifted": wave(0.2),
        "noisy": (wave(0) + pattern).clamp(0, 1),
        "16 levels": (wave(0) * 15).round() / 15,
        "inverted": 1 - wave(0),
    }
    return pictures[name]


@pytest.mark.parametrize("name", OF_SCIKIT_IMAGE)
def test_values_are_those_of_scikit_image(name: str) -> None:
    pair = wave(0)[None], altered(name)[None]
    found = psnr(*pair), ssim(*pair)
    assert found == pytest.approx(OF_SCIKIT_IMAGE[name], rel=1e-9)


def test_values_of_float32_pictures_are_the_same_to_seven_digits() -> None:
    pair = wave(0)[None].float(), altered("16 levels")[None].float()
    assert (psnr(*pair), ssim(*pair)) == pytest.approx(OF_SCIKIT_IMAGE["16 levels"], rel=1e-5)


def test_each_picture_has_its_difference_and_the_mean_is_over_them() -> None:
    reference = wave(0).expand(4, -1, -1, -1)
    other = torch.stack([altered(name) for name in OF_SCIKIT_IMAGE])
    found = picture_differences(reference, other)
    for difference, expected in zip(found, OF_SCIKIT_IMAGE.values(), strict=True):
        assert difference == pytest.approx(expected, rel=1e-9)
    ratios, similarities = zip(*OF_SCIKIT_IMAGE.values(), strict=True)
    assert psnr(reference, other) == pytest.approx(sum(ratios) / 4)
    assert ssim(reference, other) == pytest.approx(sum(similarities) / 4)


def test_identical_pictures_are_infinitely_close() -> None:
    picture = wave(0)[None].float()
    assert (psnr(picture, picture.clone()), ssim(picture, picture.clone())) == (math.inf, 1.0)


def test_an_identical_picture_does_not_hide_that_another_differs() -> None:
    reference = wave(0).expand(2, -1, -1, -1)
    other = torch.stack([wave(0), altered("noisy")])
    assert psnr(reference, other) == pytest.approx(OF_SCIKIT_IMAGE["noisy"][0])
    assert picture_differences(reference, other)[0].psnr == math.inf
    assert mean_psnr([math.inf, 20.0, 40.0]) == 30.0


def test_nan_is_not_taken_for_a_difference() -> None:
    broken = wave(0)[None]
    broken[0, 0, 20, 20] = math.nan
    assert math.isnan(psnr(wave(0)[None], broken))
    assert math.isnan(ssim(wave(0)[None], broken))


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.zeros(1, 3, 20, 20), torch.zeros(1, 3, 20, 21), r"not \[1, 3, 20, 20\] and \[1, 3, 20, 21\]"),
        (torch.zeros(3, 20, 20), torch.zeros(3, 20, 20), r"not \[3, 20, 20\]"),
        (torch.zeros(0, 3, 20, 20), torch.zeros(0, 3, 20, 20), r"not \[0, 3, 20, 20\]"),
        (torch.zeros(1, 3, 20, 20, dtype=torch.uint8), torch.zeros(1, 3, 20, 20), "not torch.uint8"),
    ],
)
def test_what_is_no_pair_of_pictures_is_refused(a: torch.Tensor, b: torch.Tensor, said: str) -> None:
    for measured in (psnr, ssim):
        with pytest.raises(InputError, match=said):
            measured(a, b)


def test_a_picture_smaller_than_the_window_has_no_similarity() -> None:
    small = torch.zeros(1, 3, 10, 40)
    assert psnr(small, small) == math.inf
    with pytest.raises(InputError, match=r"40 × 10 pixels are too small for SSIM, which needs 11 × 11"):
        ssim(small, small)
