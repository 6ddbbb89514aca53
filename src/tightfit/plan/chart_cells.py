"""A model's footprint × a card → the chart's cell; and a model's presets 0–3 beside the plan made for a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tightfit.catalog.cuda import workspace_bytes
from tightfit.errors import BudgetTooSmall
from tightfit.plan.default_rates import computer_with
from tightfit.plan.explain import describe_device_weights, summarize
from tightfit.plan.planner import SPARE, make_plan
from tightfit.plan.presets import plan_for
from tightfit.schema.chart import Cell, ChartedCard, ChartedModel, Largest, LevelRow, Preset
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator, Budget
from tightfit.schema.plan import Plan
from tightfit.units import format_bytes

__all__ = [
    "ENDLESS",
    "cell_of",
    "charted_card",
    "fits_card",
    "host_bytes",
    "level_rows",
    "plan_seconds",
    "preset_plan",
    "would_do",
]

ENDLESS = 2**60  # bytes of a card with unlimited memory


def charted_card(name: str, card: Accelerator, count: int = 1) -> ChartedCard:
    """Return `count` of `card` as a column of the chart; a plan may use 95 % of the bytes that CUDA leaves."""
    (left,) = computer_with(card).accelerators
    several = {"name": f"{count}x{name}", "title": f"{count} × {card.name}", "count": count} if count > 1 else {}
    usable = int(left.bytes * (1 - SPARE))
    return ChartedCard(**{"name": name, "title": card.name, "bytes": card.bytes, "usable_bytes": usable, **several})


def plan_on(footprint: Footprint, card: Accelerator, ram: int | None = None) -> Plan:
    """Return the plan for `card` and `ram` bytes of host memory (None: unlimited). Raises as `make_plan` does."""
    usable_bytes = charted_card(card.name, card).usable_bytes
    return make_plan(footprint, computer_with(card), None if ram is None else Budget(device=usable_bytes, ram=ram))


def fits_card(footprint: Footprint, card: Accelerator, ram: int | None = None) -> bool:
    """Whether any lossless plan fits `card` and `ram` bytes of host memory (None: unlimited)."""
    try:
        plan_on(footprint, card, ram)
    except BudgetTooSmall:
        return False
    return True


def cell_of(
    model: ChartedModel,
    footprint: Footprint,
    card: ChartedCard,
    accelerator: Accelerator,
    ram: int | None = None,
    largest: Largest | None = None,
) -> Cell:
    """Return the result of `model`, whose usual request has `footprint`, on `card`, which is `accelerator`."""
    fields = {"model": model.name, "card": card.name, "level": _lowest(model.presets, card, accelerator, ram)}
    try:
        plan = plan_on(footprint, accelerator, ram)
    except BudgetTooSmall as error:
        return Cell(**fields, summary=would_do(error), largest=largest)
    endless = make_plan(footprint, computer_with(accelerator.model_copy(update={"bytes": ENDLESS})))
    seconds = _seconds(plan)
    return Cell(
        **fields,
        summary=summarize(plan, footprint),
        peak_bytes=_peak(plan),
        seconds=seconds,
        slowdown=seconds / _seconds(endless) if _seconds(endless) else 1.0,
        largest=largest,
    )


def plan_seconds(footprint: Footprint, card: Accelerator, ram: int | None = None) -> float | None:
    """Return the predicted seconds on one `card` with `ram` bytes of host memory (None: unlimited); None: too small."""
    try:
        return _seconds(plan_on(footprint, card, ram))
    except BudgetTooSmall:
        return None


def preset_plan(footprint: Footprint, level: int, accelerator: Accelerator) -> Plan:
    """Return the plan of preset `level` on a card."""
    return plan_for(
        footprint, "cuda:0", separate=True, choices={"level": level}, request=footprint.request, pinnable=ENDLESS,
        accelerator=accelerator,
    )  # fmt: skip


def host_bytes(plan: Plan, footprint: Footprint) -> int:
    """Return the bytes of weights that `plan` offloads to RAM."""
    offloaded = (c for c in footprint.components if plan.components[c.name].placement != "resident")
    return sum(plan.components[c.name].store.ram_bytes(c.bytes) for c in offloaded)


def level_rows(
    footprint: Footprint, card: ChartedCard, accelerator: Accelerator, presets: Sequence[Preset], ram: int | None = None
) -> Iterator[LevelRow]:
    """Yield a row for each of `presets`, as simulated on `accelerator`, and one for the plan made for it, if one fits.

    `ram` is the bytes of host memory (None: unlimited).
    """
    whole = presets[0].seconds or 0.0
    for preset in presets:
        plan = preset_plan(footprint, preset.level, accelerator)
        fits = _preset_fits(preset, preset.needed_bytes, card, ram)
        yield _row(plan, footprint, preset.level, preset.needed_bytes, preset.seconds or 0.0, whole, fits=fits)
    try:
        plan = plan_on(footprint, accelerator, ram)
    except BudgetTooSmall:
        return
    yield _row(plan, footprint, None, _peak(plan), _seconds(plan), whole, fits=True)


def _row(
    plan: Plan, footprint: Footprint, level: int | None, needed: int, seconds: float, whole: float, *, fits: bool
) -> LevelRow:
    denoiser, encoders, autoencoder = (
        describe_device_weights(plan, footprint, role) for role in ("denoiser", "encoder", "autoencoder")
    )
    return LevelRow(
        level=level, needed_bytes=needed, seconds=seconds, speed=whole / seconds if seconds else 1.0,
        denoiser=denoiser, encoders=encoders, autoencoder=autoencoder, lossy=plan.lossy, fits=fits,
    )  # fmt: skip


def _lowest(presets: Sequence[Preset], card: ChartedCard, accelerator: Accelerator, ram: int | None) -> int | None:
    """Return the lowest level that fits, with `accelerator`'s own size of cuBLAS's workspace."""
    more = workspace_bytes(accelerator.compute_capability) - workspace_bytes(None)
    fitting = (p.level for p in presets if _preset_fits(p, p.needed_bytes + more, card, ram))
    return min(fitting, default=None)


def _preset_fits(preset: Preset, needed: int, card: ChartedCard, ram: int | None) -> bool:
    return needed <= card.usable_bytes and (ram is None or preset.host_bytes <= ram)


def would_do(error: BudgetTooSmall) -> str:
    """Return how many bytes would do instead."""
    needed = error.facts["needed_bytes"]
    assert isinstance(needed, int)
    return f"needs {format_bytes(needed)}"


def _peak(plan: Plan) -> int:
    return max(phase.peak_bytes for phase in plan.forecast)


def _seconds(plan: Plan) -> float:
    return sum(phase.seconds for phase in plan.forecast)
