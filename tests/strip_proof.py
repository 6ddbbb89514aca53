"""What strips do to the tiny autoencoders: how near their numbers stay to those of whole execution, and what they save.

    python tests/strip_proof.py
    python tests/strip_proof.py AutoencoderKL "AutoencoderKLWan of 2.2"

proves all of them, for an hour of one core, or only some, and writes what it finds into the table
of docs/exact-tiling.md. tests/apply/test_every_autoencoder.py holds that it is within bounds and on the page.
"""

from __future__ import annotations

import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from half_precision import FARTHER, error_ratio, is_sure, squares_of_error
from inspection import assert_same, imprint
from tightfit import fit
from tightfit.schema.results import Trace
from tiny_autoencoders import CASES, TinyAutoencoder, decode, encode

PAGE = Path(__file__).parent.parent / "docs/exact-tiling.md"
BEGIN, END = "<!-- generated: python tests/strip_proof.py -->", "<!-- end -->"
HALVES = ("bfloat16", "float16")
HEAD = ("class", "method", "how", "float32", *HALVES, "maps on the device", "maps in host memory")
TINY = tuple(case for case in CASES if not case.large)

ROUNDING = 1e-5  # of the largest value: how far float32 may be from whole execution
MOST_INPUTS = 12
BATCH = 3
ONE_STRIP, SMALLEST = 10**12, 1  # bytes for strips
HIGH, WIDE = 76, 30_000  # pixels, one way, of what is compared in float32, and all pixels of what is in half precision

Plan = tuple[dict[str, Any], str]  # and the device on which it is followed


@dataclass(frozen=True)
class Proof:
    """What was found of one method of a case, the worst of all numbers of strips.

    `why_not_split` says why it is not done in strips, or "". What is done whole is only tried in float32. `error`
    is the largest difference from whole execution in float32, of the largest value; `farther` how many times as far
    from float32 the strips are as whole execution is, root mean square, for each dtype of half precision: NaN where
    the class itself cannot work in it. `peaks` are the most bytes of activations that the smallest strips take, of
    those that whole execution takes, with maps on the device and in host memory.
    """

    name: str
    method: str
    why_not_split: str
    error: float
    farther: dict[str, float]
    peaks: tuple[float, float]

    @property
    def row(self) -> str:
        """Its line of the table: classes of figures, so that another processor's roundings change nothing."""
        if self.why_not_split:
            how = f"whole: {self.why_not_split}".replace("|", "/")
            return f"| {' | '.join((self.name, self.method, how, *['the same'] * 3, *['100 %'] * 2))} |"
        exact = f"≤ {ROUNDING:.0e}".replace("e-0", "e-") if self.error <= ROUNDING else f"**{self.error:.0e}**"
        halves = (
            "–" if math.isnan(x) else f"≤ {FARTHER} ×" if x <= FARTHER else f"**{x:.2f} ×**"
            for x in self.farther.values()
        )
        peaks = (f"{peak:.0%}".replace("%", " %") for peak in self.peaks)
        return f"| {' | '.join((self.name, self.method, 'in strips', exact, *halves, *peaks))} |"


def prove(case: TinyAutoencoder) -> Iterator[Proof]:
    """What is found of each method of `case`."""
    for method in ("decode", "encode") if case.encodes else ("decode",):
        work = _Work(case, method)
        why_not_split, error = _compare(work)
        if why_not_split:
            yield Proof(case.name, method, why_not_split, error, dict.fromkeys(HALVES, 1.0), (1.0, 1.0))
            continue
        peaks, error_of_one = _count(work)
        farther = {dtype: _farther(work, getattr(torch, dtype)) for dtype in HALVES}
        yield Proof(case.name, method, "", max(error, error_of_one), farther, peaks)


class _Work:
    """One method of a case, and its inputs."""

    def __init__(self, case: TinyAutoencoder, method: str) -> None:
        self.case, self._method = case, method
        least = self._rows(1)
        self._ratio = int(case.pixels(least, 1).shape[-2]) // least  # pixels, one way, for each position of latents
        self._takes_odd = False
        if method == "encode":
            model = case.make()
            self._takes_odd = _works(lambda: self(model, self._odd(3, 1, 5, 1)))

    def __call__(self, model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)  # some draw noise
        batch = len(given) // len(self.case.latents(self._rows(1), 1))  # where frames stand in it, of clips
        return decode(model, self.case, given, batch) if self._method == "decode" else encode(model, given)

    def high(self, batch: int) -> torch.Tensor:
        """High and narrow pictures or clips."""
        return self._given(self._rows(HIGH // self._ratio | 1), batch, 5, 1)

    def wide(self, seed: int) -> torch.Tensor:
        """A batch of low and wide ones: few strips, and enough pixels for roundings to even out."""
        rows = self._rows(3)
        column = self.case.pixels(rows, 1, 1)
        return self._given(rows, BATCH, max(5, WIDE * column.shape[1] // column.numel()) | 1, seed)

    def _rows(self, rows: int) -> int:
        """As many rows of latents as the case can have, about `rows`."""
        case = self.case
        return case.only_rows or max(rows // case.granule * case.granule, case.least_rows)

    def _given(self, rows: int, batch: int, columns: int, seed: int) -> torch.Tensor:
        if self._takes_odd:
            return self._odd(rows, batch, columns, seed)
        return (self.case.latents if self._method == "decode" else self.case.pixels)(rows, batch, columns, seed)

    def _odd(self, rows: int, batch: int, columns: int, seed: int) -> torch.Tensor:
        """Pictures of a size that is no multiple of anything."""
        taller = self.case.pixels(self._rows(rows + self.case.granule), batch, columns + 1, seed)
        return taller[..., : rows * self._ratio + 3, : columns * self._ratio + 1]


def _works(call: Callable[[], object]) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # a slow kernel is said once to be slow
            call()
    except Exception:  # whatever a class says to what it was not made for
        return False
    return True


def _plan(strips: int, maps: str) -> Plan:
    return {"vae": {"strips": strips, "feature_maps": maps}}, "loopback" if maps == "host" else "cpu"


def _run(
    work: _Work, model: nn.Module, given: torch.Tensor, plan: Plan, *, count: bool = False
) -> tuple[torch.Tensor, Trace]:
    """What `work` gives under `plan`, and its trace; bytes are only counted if asked for, because that takes time.

    Nothing is left on `model`.
    """
    before = imprint(model)
    fitted = fit(model, plan=plan[0], device=plan[1], count_activations=count)
    found = work(model, given)
    trace = fitted.report().trace
    fitted.undo()
    assert_same(before, imprint(model))
    assert trace.lossy == ()
    return found, trace


def _compare(work: _Work) -> tuple[str, float]:
    """Why `work` runs whole, or "", and how far it is from whole execution in float32, of the largest value."""
    model, worst, why_not_split = work.case.make(), 0.0, ""
    given = work.high(BATCH)
    whole = work(model, given)
    between = whole.nbytes // len(whole)
    for plan in (_plan(SMALLEST, "host"), _plan(between, "recompute"), _plan(ONE_STRIP, "device")):
        found, trace = _run(work, model, given, plan)
        worst = max(worst, _largest_difference(found, whole))
        why_not_split = "; ".join(note.partition(" runs whole: ")[2] for note in trace.notes if " runs whole: " in note)
        if why_not_split:
            break
    return why_not_split, worst


def _largest_difference(found: torch.Tensor, whole: torch.Tensor) -> float:
    assert found.shape == whole.shape
    difference = float((found - whole).abs().max() / whole.abs().max())
    return math.inf if math.isnan(difference) else difference


def _count(work: _Work) -> tuple[tuple[float, float], float]:
    """The share of whole execution's bytes that the smallest strips take, by where maps wait, and the error."""
    model, given = work.case.make(), work.high(1)
    work(model, given)  # some classes give themselves attributes in their first call
    whole, trace = _run(work, model, given, ({}, "cpu"), count=True)
    shares, worst, most = [], 0.0, _activations(trace)
    for maps in ("device", "host"):
        found, trace = _run(work, model, given, _plan(SMALLEST, maps), count=True)
        shares.append(_activations(trace) / most)
        worst = max(worst, _largest_difference(found, whole))
    return (shares[0], shares[1]), worst


def _activations(trace: Trace) -> int:
    """Their bytes at most, inputs aside."""
    (phase,) = trace.phases
    return phase.peak_bytes - phase.peak_weights


def _farther(work: _Work, dtype: torch.dtype) -> float:
    """How many times as far from float32 strips are as whole execution is, the same weights and inputs given."""
    model, reference = work.case.make().to(dtype), work.case.make()
    reference.load_state_dict({name: value.to(torch.float32) for name, value in model.state_dict().items()})
    given = work.wide(1).to(dtype)
    if not _works(lambda: work(model, given)) or not work(model, given).isfinite().all():
        return math.nan
    plans = (_plan(ONE_STRIP, "device"), _plan(SMALLEST, "host"))
    squares_of_whole, squares = torch.zeros(0), {number: torch.zeros(0) for number in range(len(plans))}
    for seed in range(1, MOST_INPUTS + 1):
        given = work.wide(seed).to(dtype)
        exact = work(reference, given.float())
        squares_of_whole = torch.cat((squares_of_whole, squares_of_error(work(model, given), exact)))
        for number, plan in enumerate(plans):
            squares[number] = torch.cat((squares[number], squares_of_error(_run(work, model, given, plan)[0], exact)))
        ratios = [error_ratio(some, squares_of_whole) for some in squares.values()]
        if all(map(is_sure, ratios)):
            break
    return max(ratio for ratio, _ in ratios)


def rows_of(page: str) -> list[str]:
    """The lines of the table on `page`, without its head."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return [line for line in table.splitlines() if line.startswith("| ")][1:]


def _with_rows(page: str, rows: list[str]) -> str:
    """`page` with these lines in place of those of the same cases; all in the order of CASES."""
    new = {_case_of(row) for row in rows}
    lines = [row for row in rows_of(page) if _case_of(row) not in new] + rows
    names = [case.name for case in TINY]
    lines = sorted((row for row in lines if _case_of(row) in names), key=lambda row: names.index(_case_of(row)))
    table = "\n".join((f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", *lines))
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _case_of(row: str) -> str:
    return row.split(" | ", 1)[0].removeprefix("| ")


def _proofs(name: str) -> list[Proof]:
    torch.set_num_threads(1)
    return [proof for case in TINY if case.name == name for proof in prove(case)]


def main() -> None:
    """Prove the cases named, or all, and say in the end which could not be proved."""
    names, failed = sys.argv[1:] or [case.name for case in TINY], []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        works = {pool.submit(_proofs, name): name for name in names}
        for work in as_completed(works):
            if error := work.exception():
                failed.append(works[work])
                traceback.print_exception(error)
                continue
            print(*work.result(), sep="\n", flush=True)
            PAGE.write_text(_with_rows(PAGE.read_text(), [proof.row for proof in work.result()]))
    if failed:
        sys.exit(f"no line for {', '.join(failed)}")


if __name__ == "__main__":
    main()
