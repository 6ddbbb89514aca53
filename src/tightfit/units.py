"""Sizes of memory: text ⇄ bytes; rates of links ← text; times → text. No other module parses or formats sizes.

"8GB" is 8·10⁹ bytes (SI) and "8GiB" is 8·2³⁰ (IEC).
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from tightfit.errors import InputError

__all__ = ["format_bytes", "format_enough", "format_seconds", "parse_bytes", "parse_rate"]

LONGEST = 1000  # characters of a size: Python reads numbers of up to 4300 digits
_FACTORS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)(bit|b)(?:/s)?\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: str | int) -> int:
    """Return the bytes of `size`: a number of bytes, or text such as "8GB" (10⁹), "1.5 GiB" (2³⁰), "512MiB".

    Raises InputError if `size` is not positive or not a size.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        value = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) and len(size) <= LONGEST else None
        if match is None or match[2].lower() not in _FACTORS:
            raise InputError(
                f"{size!r} is not a size: write it like 8GB (10⁹ bytes each) or 8GiB (2³⁰)", size=str(size)
            )
        value = round(Fraction(match[1]) * _FACTORS[match[2].lower()])
    if value <= 0:
        raise InputError(f"a size must be at least one byte, not {size!r}", size=str(size))
    return value


def parse_rate(rate: str) -> float:
    """Return the bytes per second of a link: text such as "100Gbit", "25 Gbit/s" or "12.5GB/s".

    Raises InputError if `rate` is not positive or not a rate.
    """
    match = _RATE.fullmatch(rate) if len(rate) <= LONGEST else None
    units = 8 if match and match[3].lower() == "bit" else 1  # in a byte
    value = float(match[1]) * _FACTORS[match[2].lower() + "b"] / units if match else 0.0
    if not 0 < value < math.inf:
        raise InputError(f"{rate!r:.60} is not the rate of a link: write it like 100Gbit or 12.5GB/s", rate=rate)
    return value


def format_bytes(count: float) -> str:
    """Format `count` bytes with three digits and a binary unit.

    >>> format_bytes(24_292_000_000)
    '22.6 GiB'
    """
    if count < 0:
        return "-" + format_bytes(-count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} PiB"


def format_enough(count: int) -> str:
    """Format `count` bytes as `format_bytes` does, but rounded up: the text is never less than `count`.

    >>> format_bytes(1_706_000_000), format_enough(1_706_000_000)
    ('1.59 GiB', '1.59 GiB')
    >>> format_bytes(1_708_000_000), format_enough(1_708_000_000)
    ('1.59 GiB', '1.6 GiB')
    """
    said = format_bytes(count)
    if parse_bytes(said) >= count:
        return said
    number, unit = said.split()
    digits = 3 - len(number.partition(".")[0])
    return format_bytes(int((Fraction(number) + Fraction(1, 10**digits)) * _FACTORS[unit.lower()]))


def format_seconds(seconds: float) -> str:
    """Format `seconds`: '14 ms', '0.42 s', '12.3 s', '4 min 05 s', '1 h 02 min'."""
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
