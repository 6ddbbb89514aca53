"""A Comparison and its pictures → one PNG: lossless, lossy and their difference side by side, with the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from tightfit.files import replacing
from tightfit.report.comparison import Comparison, difference_words
from tightfit.report.summary import Report
from tightfit.schema.results import PictureDifference
from tightfit.units import format_bytes, format_seconds

__all__ = ["SheetRow", "write_sheet"]

INK, GREY, HAIR, PAPER = "#24292f", "#57606a", "#c9ced6", "#ffffff"
SMALLEST, LARGEST = 320, 1024  # pixels: smaller pictures are enlarged by a whole number, larger ones reduced
FACTORS = (1, 2, 4, 8, 16, 32, 64)  # by which differences may be enlarged
BRIGHTEST = 99  # percentile of the differences that the enlarged ones still show as they are
MARGIN, GAP, LINE = 1.6, 0.8, 1.5  # around all, between pictures and of a line, in sizes of the type
COLUMNS, NARROWEST = 3, 16  # and the least width of one, in sizes of the type


class SheetRow(NamedTuple):
    """A picture, or a frame of a video, of both calls."""

    label: str
    reference: Image.Image
    lossy: Image.Image
    difference: PictureDifference


def write_sheet(comparison: Comparison, rows: Sequence[SheetRow], path: Path, metadata: Mapping[str, str]) -> None:
    """Write `rows` below each other to the PNG file `path`, with `metadata` as text; its "prompt" is the title.

    The file is written atomically. OSError if it cannot be.
    """
    info = PngInfo()
    for key, value in metadata.items():
        info.add_itxt(key, value)
    sheet = _Sheet(comparison, rows, metadata).drawn()
    with replacing(path) as partial:
        sheet.save(partial, format="PNG", pnginfo=info)


class _Sheet:
    """Sizes in pixels, and what is drawn with them."""

    def __init__(self, comparison: Comparison, rows: Sequence[SheetRow], metadata: Mapping[str, str]) -> None:
        self._comparison, self._rows, self._metadata = comparison, rows, metadata
        first = rows[0].reference
        self._scale = _scale(max(first.size))
        self._width, self._height = (max(1, round(side * self._scale)) for side in first.size)
        size = max(13, min(self._width // 24, 22))
        self._column = max(self._width, NARROWEST * size)
        self._type, self._bold = _font("DejaVuSans", size), _font("DejaVuSans-Bold", size)
        self._title = _font("DejaVuSans-Bold", round(size * 1.3))
        self._line, self._margin, self._gap = (round(each * size) for each in (LINE, MARGIN, GAP))
        self._factor = _factor(rows)
        self._columns = [
            [part for line in lines for part in _wrapped(line, self._type, self._column)]
            for lines in self._column_lines()
        ]
        self._top = self._margin + (3 + max(map(len, self._columns))) * self._line + self._gap // 2
        self._step = self._height + self._line + self._gap

    def drawn(self) -> Image.Image:
        """Return the whole sheet."""
        wide = 2 * self._margin + COLUMNS * self._column + (COLUMNS - 1) * self._gap
        high = self._top + len(self._rows) * self._step - self._gap + self._margin
        sheet = Image.new("RGB", (wide, high), PAPER)
        pen = ImageDraw.Draw(sheet)
        across = wide - 2 * self._margin
        self._write(pen, self._metadata["prompt"], (self._margin, self._margin), self._title, INK, across)
        place = (self._margin, self._margin + round(1.3 * self._line))
        self._write(pen, self._subtitle(), place, self._type, GREY, across)
        for column, lines in enumerate(self._columns):
            for number, text in enumerate(lines):
                place = (self._left(column), self._margin + (3 + number) * self._line)
                font, colour = (self._bold, INK) if number == 0 else (self._type, GREY)
                self._write(pen, text, place, font, colour, self._column)
        for number, row in enumerate(self._rows):
            self._draw_row(sheet, pen, row, self._top + number * self._step)
        return sheet

    def _draw_row(self, sheet: Image.Image, pen: ImageDraw.ImageDraw, row: SheetRow, top: int) -> None:
        pictures = (row.reference, row.lossy, _enlarged(row, self._factor))
        for column, picture in enumerate(pictures):
            shown = picture.convert("RGB").resize((self._width, self._height), self._resampling)
            left = self._left(column)
            sheet.paste(shown, (left, top))
            pen.rectangle((left - 1, top - 1, left + self._width, top + self._height), outline=HAIR)
        below = top + self._height + self._line // 5
        self._write(pen, row.label, (self._left(0), below), self._type, GREY, self._column)
        self._write(pen, _said(row.difference), (self._left(COLUMNS - 1), below), self._type, INK, self._column)

    def _left(self, column: int) -> int:
        return self._margin + column * (self._column + self._gap)

    @property
    def _resampling(self) -> Image.Resampling:
        return Image.Resampling.NEAREST if self._scale >= 1 else Image.Resampling.LANCZOS

    def _subtitle(self) -> str:
        trace, request = self._comparison.lossy.trace, self._comparison.lossy.plan.request
        wide, high = self._rows[0].reference.size
        steps = [f"{request.steps} steps"] if request is not None and request.steps else []
        said = [self._metadata["model"], f"seed {self._metadata['seed']}", f"{wide} × {high}", *steps, trace.device]
        said += [f"shown at {self._scale:.0%}"] if self._scale != 1 else []
        return ", ".join(said)

    def _column_lines(self) -> list[list[str]]:
        """Return the heading of each column, and what is said below it."""
        plain, lossy = self._comparison.reference, self._comparison.lossy
        identical = all(row.difference.psnr == math.inf for row in self._rows)
        difference = "no difference" if identical else f"difference × {self._factor}"
        mean = [f"mean {_said(self._comparison.mean)}"] if len(self._rows) > 1 and not identical else []
        faster = f"{self._comparison.speed:.2f} × as fast"
        return [
            ["lossless", *_measured(plain)],
            ["lossy", *_measured(lossy, f" ({faster})"), *self._comparison.lossy_words],
            [difference, *mean],
        ]

    def _write(
        self,
        pen: ImageDraw.ImageDraw,
        text: str,
        place: tuple[int, int],
        font: ImageFont.FreeTypeFont,
        colour: str,
        across: int,
    ) -> None:
        """Write one line, shortened to `across` pixels."""
        line = " ".join(text.split())
        if font.getlength(line) > across:
            while line and font.getlength(f"{line}…") > across:
                line = line[:-1]
            line = f"{line.rstrip()}…"
        pen.text(place, line, font=font, fill=colour)


def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), size)


def _scale(side: int) -> float:
    """Return by what pictures with the longest side `side` are enlarged or reduced."""
    return LARGEST / side if side > LARGEST else float(max(1, math.ceil(SMALLEST / side)))


def _measured(report: Report, beside: str = "") -> list[str]:
    return [f"{format_seconds(report.trace.seconds)}{beside}", f"peak {format_bytes(report.trace.peak_bytes)}"]


def _said(difference: PictureDifference) -> str:
    ratio, similarity = difference_words(difference)
    return ratio if difference.psnr == math.inf else f"PSNR {ratio}, SSIM {similarity}"


def _wrapped(text: str, font: ImageFont.FreeTypeFont, across: int) -> list[str]:
    """Return `text` in lines of at most `across` pixels, where words are not longer themselves."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= across or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _differences(row: SheetRow) -> NDArray[np.int16]:
    """Return the absolute differences [H, W, 3] between the pictures of `row`, from 0 to 255."""
    a, b = (np.asarray(picture.convert("RGB"), dtype=np.int16) for picture in (row.reference, row.lossy))
    difference: NDArray[np.int16] = np.abs(a - b)
    return difference


def _factor(rows: Sequence[SheetRow]) -> int:
    """Return the largest factor by which the differences can be enlarged without much of them becoming white."""
    high = max(float(np.percentile(_differences(row).max(axis=-1), BRIGHTEST)) for row in rows)
    return max(factor for factor in FACTORS if factor == 1 or factor * high <= 255)


def _enlarged(row: SheetRow, factor: int) -> Image.Image:
    return Image.fromarray(np.minimum(_differences(row) * factor, 255).astype(np.uint8))
