"""One model on one card: the plan in few words, its peak and time, and the lowest preset that fits."""

from __future__ import annotations

import pytest

from plan.test_planner import CARD, GIB, MIB, component, legs_of, passes_of, phase
from tightfit.errors import BudgetTooSmall
from tightfit.plan.chart_cells import cell_of, charted_card, fits_card, host_bytes, level_rows, plan_on, preset_plan
from tightfit.plan.explain import describe_device_weights, summarize
from tightfit.schema.chart import Cell, ChartedModel, Largest, Preset
from tightfit.schema.footprint import Footprint, StripProfile
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan, Plan, VaePlan
from tightfit.schema.request import Request

CONTEXT = 512 * MIB
REQUEST = Request(height=1024, width=1024, steps=8)


def footprint_of(scale: float = 1) -> Footprint:
    """0.8 GiB of encoder, 2 GiB of denoiser; a small autoencoder wants 1 GiB of activations, or in strips a tenth."""
    text = component("text_encoder", "encoder", [200 * MIB] * 4, MIB)
    unet = component("unet", "denoiser", [200 * MIB] * 10, MIB)
    vae = component("vae", "autoencoder", [100 * MIB], MIB)
    room = int(scale * GIB)
    decoded = passes_of(vae, [10**10], 1, room)
    way = StripProfile(
        strip_bytes=64 * MIB,
        feature_maps="device",
        allocator_bytes=100 * MIB,
        host_bytes=0,
        stages=legs_of(decoded, 16, 2000),
    )
    return Footprint(
        pipeline="Tried",
        components=(text, unet, vae),
        request=REQUEST,
        phases=(
            phase("encode", passes_of(text, [10**9] * 4, 1, 10 * MIB), 10 * MIB),
            phase("denoise", passes_of(unet, [10**11] * 10, 8, 100 * MIB), int(scale * 100 * MIB)),
            phase("decode", decoded, room, (way,)),
        ),
    )


FOOTPRINT = footprint_of()
PRESETS = tuple(
    Preset(level=level, needed_bytes=needed, host_bytes=host)
    for level, needed, host in ((0, 4 * GIB, 0), (1, 3 * GIB, 0), (2, 2 * GIB + GIB // 2, GIB), (3, GIB, 3 * GIB))
)
MODEL = ChartedModel(name="tried", request=REQUEST, presets=PRESETS)


def card_with(size: int) -> Accelerator:
    """A card of which a plan may use `size` bytes."""
    return CARD.model_copy(update={"name": "a card", "bytes": int(size / 0.95) + CONTEXT + 1})


def cell(size: int, ram: int | None = None, largest: Largest | None = None) -> Cell:
    card = card_with(size)
    return cell_of(MODEL, FOOTPRINT, charted_card("a-card", card), card, ram, largest)


def test_a_plan_may_use_95_percent_of_what_cuda_leaves() -> None:
    assert charted_card("c", CARD).usable_bytes == int(0.95 * (80 * GIB - CONTEXT))
    assert charted_card("c", card_with(3 * GIB)).usable_bytes == pytest.approx(3 * GIB, abs=2)


@pytest.mark.parametrize(
    ("size", "level"),
    [(4 * GIB + MIB, 0), (4 * GIB - MIB, 1), (3 * GIB - MIB, 2), (2 * GIB, 3), (GIB + MIB, 3), (GIB - MIB, None)],
)
def test_the_level_is_the_lowest_that_fits(size: int, level: int | None) -> None:
    assert cell(size).level == level


def test_a_card_with_a_larger_workspace_needs_that_much_more() -> None:
    card = card_with(4 * GIB + MIB).model_copy(update={"compute_capability": "9.0"})
    assert cell_of(MODEL, FOOTPRINT, charted_card("c", card), card).level == 1


def test_what_waits_in_ram_must_fit_there() -> None:
    assert cell(2 * GIB, ram=4 * GIB).level == 3
    assert cell(2 * GIB, ram=2 * GIB).level is None


def test_a_cell_tells_of_the_plan_that_is_made_for_the_card() -> None:
    for size in (GIB, 2 * GIB, 5 * GIB):
        told, plan = cell(size), plan_on(FOOTPRINT, card_with(size))
        assert told.seconds == sum(part.seconds for part in plan.forecast)
        assert told.peak_bytes == max(part.peak_bytes for part in plan.forecast)
        assert told.peak_bytes <= size
        assert told.summary == summarize(plan, FOOTPRINT)
        assert told.slowdown is not None
        assert told.slowdown >= 1
    assert cell(5 * GIB).slowdown == 1
    assert cell(5 * GIB).summary == "all on the card"


def test_a_limit_of_ram_is_kept_to() -> None:
    plan = plan_on(FOOTPRINT, card_with(GIB), 100 * MIB)
    assert any(part.offload_to == "disk" for part in plan.components.values())
    assert (cell(GIB, ram=100 * MIB).seconds or 0) > (cell(GIB).seconds or 0)  # the disk is slower than the link


def test_what_is_refused_says_what_would_do() -> None:
    told = cell(150 * MIB)
    assert (told.seconds, told.peak_bytes, told.slowdown, told.level) == (None, None, None, None)
    with pytest.raises(BudgetTooSmall) as error:
        plan_on(FOOTPRINT, card_with(150 * MIB))
    needed = error.value.facts["needed_bytes"]
    assert isinstance(needed, int)
    assert told.summary == f"needs {needed // MIB} MiB"
    assert fits_card(FOOTPRINT, card_with(needed))
    assert not fits_card(FOOTPRINT, card_with(needed - 4 * MIB))


def test_the_largest_goes_into_the_cell() -> None:
    largest = Largest(request=REQUEST, limit="ladder")
    assert cell(GIB, largest=largest).largest == cell(150 * MIB, largest=largest).largest == largest


def planned(vae: VaePlan | None = None, **components: ComponentPlan) -> Plan:
    given = {part.name: components.get(part.name, ComponentPlan()) for part in FOOTPRINT.components}
    return Plan(components=given, vae=vae or VaePlan())


STREAMS = ComponentPlan(placement="stream", granularity="layer", ring_buffer=200 * MIB + 4096, resident_layers=())


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (planned(), "all on the card"),
        (planned(text_encoder=ComponentPlan(placement="offload")), "encoders offloaded"),
        (planned(unet=STREAMS), "streams denoiser 10 %"),
        (
            planned(VaePlan(strips=2**26, feature_maps="host"), unet=STREAMS, text_encoder=STREAMS),
            "streams encoders 25 %, denoiser 10 %; strips, maps in RAM",
        ),
        (
            planned(unet=STREAMS.model_copy(update={"offload_to": "disk", "ring_buffer": 201 * MIB})),
            "streams denoiser 10 % from the disk",
        ),
        (planned(VaePlan(tile=512)), "tiles of 512 px"),
        (planned(unet=ComponentPlan(storage="int8")), "int8"),
    ],
)
def test_a_plan_in_a_few_words(plan: Plan, words: str) -> None:
    assert summarize(plan, FOOTPRINT) == words


def test_what_is_there_while_it_works() -> None:
    plan = planned(VaePlan(tile=512), unet=STREAMS, text_encoder=ComponentPlan(placement="offload"))
    assert describe_device_weights(plan, FOOTPRINT, "denoiser") == "201 MiB of 1.95 GiB, streamed"
    assert describe_device_weights(plan, FOOTPRINT, "encoder") == "801 MiB, while running"
    assert describe_device_weights(plan, FOOTPRINT, "autoencoder") == "101 MiB, resident; tiles of 512 px"
    assert describe_device_weights(plan, FOOTPRINT, "other") == "none"


def test_presets_wait_in_ram_with_what_is_not_resident() -> None:
    waiting = [host_bytes(preset_plan(FOOTPRINT, level, CARD), FOOTPRINT) for level in range(4)]
    whole = sum(part.bytes for part in FOOTPRINT.components)
    assert waiting == [0, 0, 801 * MIB, whole]


def test_rows_of_levels_and_of_what_is_made_for_the_card() -> None:
    presets = [preset.model_copy(update={"seconds": 10.0 + preset.level}) for preset in PRESETS]
    card = card_with(2 * GIB)
    *levels, made = level_rows(FOOTPRINT, charted_card("c", card), card, presets)
    assert [row.level for row in levels] == [0, 1, 2, 3]
    assert [row.fits for row in levels] == [False, False, False, True]
    assert [row.speed for row in levels] == [1, 10 / 11, 10 / 12, 10 / 13]
    assert [bool(row.lossy) for row in levels] == [False, True, True, True]  # more than 512 pixels, in tiles
    assert (made.level, made.fits, made.lossy) == (None, True, ())
    assert made.needed_bytes <= 2 * GIB
    small = card_with(150 * MIB)
    assert [row.level for row in level_rows(FOOTPRINT, charted_card("c", small), small, presets)] == [0, 1, 2, 3]
