"""A comparison as text, as JSON and as a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tightfit.report.comparison import Comparison
from tightfit.report.comparison_sheet import SheetRow, write_sheet
from tightfit.report.summary import Report
from tightfit.schema.plan import Plan
from tightfit.schema.results import CacheTrace, PhaseTrace, PictureDifference, Trace

CACHE = {"strategy": "static", "interval": 4}
WHAT = "step-cache: static in unet"
SAME = PictureDifference(math.inf, 1.0)
METADATA = {"prompt": "a red fox", "seed": "7", "model": "tiny"}


def report(seconds: float, *, lossy: bool, used: bool = True) -> Report:
    plan = Plan.from_mapping({"components": {"unet": {"cache": CACHE if lossy else None}}})
    phase = PhaseTrace(name="denoise", start=0.0, seconds=seconds, peak_bytes=2**20)
    skipped = (1, 2, 3) if used else ()
    cache = CacheTrace(component="unet", strategy="static", steps=20, skipped_steps=skipped)
    more: dict[str, Any] = {"caches": (cache,), "lossy": (WHAT,) * used} if lossy else {}
    return Report(plan, Trace(seconds=seconds, phases=(phase,), **more))


def comparison(*differences: PictureDifference, used: bool = True, notes: tuple[str, ...] = ()) -> Comparison:
    return Comparison(report(3.0, lossy=False), report(2.0, lossy=True, used=used), differences, notes)


def grey(value: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    return Image.new("RGB", size, (value, value, value))


def sheet(tmp_path: Path, made: Comparison, rows: list[SheetRow]) -> Image.Image:
    write_sheet(made, rows, tmp_path / "sheet.png", METADATA)
    with Image.open(tmp_path / "sheet.png") as picture:
        picture.load()
        return picture


def test_the_table_has_both_calls_and_each_picture() -> None:
    made = comparison(PictureDifference(30.0, 0.9), PictureDifference(40.0, 0.98), notes=("so\nit is",))
    assert [" ".join(line.split()) for line in str(made).splitlines() if line.strip()] == [
        "1.50 × as fast, mean PSNR 35.0 dB, SSIM 0.9400",
        "lossless lossy",
        "seconds 3 s 2 s",
        "peak 1 MiB 1 MiB",
        "skipped steps 0 3 of 20",
        "PSNR SSIM",
        "picture 1 30.0 dB 0.9000",
        "picture 2 40.0 dB 0.9800",
        "mean 35.0 dB 0.9400",
        "lossy: step-cache: static (interval=4) in unet, 3 of 20 steps skipped "
        "(denoisers reuse in some steps what they computed in earlier ones)",
        "note: so it is",
    ]


def test_identical_pictures_are_called_so_and_do_not_hide_another() -> None:
    same = comparison(SAME, used=False)
    assert "1.50 × as fast, identical pictures" in str(same)
    assert "picture 1  identical  1.0000" in str(same)
    assert "not used: step-cache: static in unet" in str(same)
    assert same.to_mapping()["mean"] == {"psnr": None, "ssim": 1.0, "identical": True}
    both = comparison(SAME, PictureDifference(30.0, 0.9))
    assert both.mean == PictureDifference(30.0, 0.95)
    assert [each["identical"] for each in both.to_mapping()["pictures"]] == [True, False]


def test_json_has_both_reports_and_no_infinity() -> None:
    printed = json.loads(json.dumps(comparison(SAME).to_mapping(), allow_nan=False))
    assert set(printed) == {"pictures", "mean", "speed", "notes", "reference", "lossy"}
    assert printed["reference"]["lossless"] is True
    assert printed["lossy"]["lossy"] == [WHAT]
    assert printed["speed"] == 1.5


def test_the_sheet_has_three_pictures_beside_each_other_for_each_row(tmp_path: Path) -> None:
    row = SheetRow("seed 7", grey(100), grey(110), PictureDifference(28.1, 0.9))
    one = sheet(tmp_path, comparison(PictureDifference(28.1, 0.9)), [row])
    two = sheet(tmp_path, comparison(PictureDifference(28.1, 0.9)), [row, row])
    assert one.width == two.width > 3 * 64 * 5  # enlarged by 5, to 320 pixels at least
    assert two.height - one.height >= 48 * 5
    assert {name: one.text[name] for name in METADATA} == METADATA  # type: ignore[attr-defined]


@pytest.mark.parametrize(("other", "factor"), [(110, 16), (103, 64), (100, 64), (250, 1)])
def test_the_difference_is_enlarged_as_far_as_it_stays_visible(tmp_path: Path, other: int, factor: int) -> None:
    row = SheetRow("", grey(100), grey(other), PictureDifference(20.0, 0.9))
    values = np.asarray(sheet(tmp_path, comparison(PictureDifference(20.0, 0.9)), [row]))
    third = values[-120, -100]  # inside the third picture
    assert list(third) == [abs(other - 100) * factor] * 3
    assert list(values[-120, 100]) == [100, 100, 100]


@pytest.mark.parametrize(
    ("side", "shown"), [(64, 320), (128, 384), (320, 320), (1024, 1024), (1025, 1024), (4096, 1024)]
)
def test_pictures_are_enlarged_by_whole_numbers_and_reduced_above_1024_pixels(
    tmp_path: Path, side: int, shown: int
) -> None:
    row = SheetRow("", grey(0, (side, 16)), grey(0, (side, 16)), SAME)
    width = sheet(tmp_path, comparison(SAME), [row]).width
    assert 3 * shown < width < 3 * shown + 120


def test_columns_are_wide_enough_for_words_where_pictures_are_not(tmp_path: Path) -> None:
    row = SheetRow("", grey(0, (8, 512)), grey(0, (8, 512)), SAME)
    assert sheet(tmp_path, comparison(SAME), [row]).width > 3 * 200


def test_pictures_of_other_modes_and_long_words_are_drawn(tmp_path: Path) -> None:
    row = SheetRow("x" * 999, grey(0).convert("RGBA"), grey(9).convert("L"), PictureDifference(30.0, 0.9))
    made = comparison(PictureDifference(30.0, 0.9))
    write_sheet(made, [row], tmp_path / "a.png", METADATA | {"prompt": "word\n" * 999})
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.mode == "RGB"
        assert np.asarray(picture)[:40, -18:].min() == 255  # the title ends before the margin
        assert picture.width < 3 * 320 + 120
