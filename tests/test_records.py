"""The nouns: to text and back, frozen, equal by value, and one clear line for whatever is illegal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tightfit.errors import InputError, PlanError, RequestError, unknown_name
from tightfit.run.answer_cache import keep, lookup
from tightfit.schema import footprint, machine, plan, results
from tightfit.schema.base import Record
from tightfit.schema.device_map import DeviceMap
from tightfit.schema.footprint import (
    BlockUse,
    Component,
    ComponentCall,
    Footprint,
    Phase,
    StripProfile,
    StripStageProfile,
    Variant,
    WeightBlock,
)
from tightfit.schema.machine import Accelerator, Budget, KernelGroup, LayerWork, Machine
from tightfit.schema.plan import (
    TECHNIQUES,
    ComponentPlan,
    ComponentRun,
    NetworkPart,
    PhaseForecast,
    Plan,
    Reason,
    VaePlan,
    check_techniques,
)
from tightfit.schema.request import Request
from tightfit.schema.results import (
    CallMeasurement,
    PhaseMeasurement,
    PhaseTrace,
    Prediction,
    Sample,
    Trace,
)
from tightfit.schema.step_cache import CacheTrace, StepCache

# one of each, every field different from its default

REQUEST = Request(
    height=768, width=512, frames=81, batch=2, steps=20, guidance=3.5, backward="lora:16",
    arguments={"max_sequence_length": 256, "true_cfg_scale": 4.0, "clean_caption": False, "human_instruction": None},
)  # fmt: skip
BUDGET = Budget(device=8 * 10**9, ram=32 * 2**30)
BUDGETS = Budget(devices={"cuda:0": 8 * 10**9, "cuda:1": 6 * 10**9})
CARD = Accelerator(
    name="cuda:0", kind="cuda", bytes=80 * 2**30, free=79 * 2**30, allocated=2**20, product_name="NVIDIA H100",
    expandable_refused="the driver refuses them", compute_capability="9.0", flash=False,
    arithmetic_rates={"bfloat16": 1e15, "float32": 6.7e13}, memory_rate=3.35e12, link_rate=5.5e10,
    link_rate_out=5.4e10, exchange_rate=1.5e11, exchange_latency=2e-5, network_rate=1.25e10, ranks_sharing_weights=2,
    launch_overhead=5e-6, streamed_overhead=9e-6, resident_overhead=2e-6,
    channels_last_gains={"denoiser.float16": 1.2}, multiprocessors=132, clock=1.98e9, tail=0.4, cache_bytes=2**25,
    cache_rate=6e12, kernel_latency=4e-6, module_overhead=3e-5,
)  # fmt: skip
MACHINE = Machine(
    accelerators=(CARD,), ram=2**37, ram_used=2**29, ram_free=2**36, ram_limit=2**37, pinnable=2**35, cores=16,
    cpu="EPYC", disk_rate=3e9, notes=("no link",),
)  # fmt: skip
UNIT = WeightBlock(
    name="transformer_blocks.0", bytes=678, dtypes={"bfloat16": 600, "float32": 78}, matrices={"bfloat16": 500},
    rows=25, moves_with="transformer_blocks",
)  # fmt: skip
LEAF = WeightBlock(name="transformer_blocks.0.ff.net.2", bytes=567, dtypes={"bfloat16": 567})
COMPONENT = Component(
    name="unet",
    class_name="UNet",
    role="denoiser",
    bytes=1234,
    allocator_bytes=2345,
    dtypes={"bfloat16": 1234},
    blocks=(UNIT,),
    layers=(LEAF,),
    small_tensors=3,
    has_skip_connections=True,
    compiled=True,
    convolves=True,
    has_forward=False,
    head_widths=(40, 80),
    gradient_bytes=12,
)
WORKLOAD = KernelGroup(
    kind="matmul", dtype="bfloat16", operations=8, traffic=16, kernels=2, padding=1, exponentials=2, tile_operations=3,
    copied=4, serial=5, divisions=7, module_calls=6,
)  # fmt: skip
TURN = LayerWork(layer="transformer_blocks.0.ff.net.2", work=(WORKLOAD,), copied_in=2**20, holds=True, host_waits=True)
USE = BlockUse(block="transformer_blocks.0", live_bytes_at_start=32, peak=64, layer_work=(TURN,))
PASS = ComponentCall(
    component="unet",
    method="forward",
    runs=2,
    peak=65,
    block_uses=(USE,),
    after_blocks=("conv_out",),
    paired=True,
    overlaps=True,
    backward_from=0,
    left_out_from=0,
    time_scale=1.5,
    is_part=True,
    crossing_bytes=9,
)
LEG = StripStageProfile(
    strips=3,
    prefetches=True,
    before_strips=(TURN,),
    layer_work=(TURN,),
    strip_counts=(2,),
    strip_ends=(2,),
    copies=6,
    bytes_in=7,
    bytes_out=8,
)
WAY = StripProfile(
    strip_bytes=2**26, feature_maps="host", allocator_bytes=4, host_bytes=5, batch_items=2, stages=(LEG,)
)
STRETCH = Phase(
    name="denoise",
    peak=66,
    peak_between_calls=65,
    allocator_bytes=67,
    calls=(PASS,),
    call_order=(0, 0),
    other_work=(WORKLOAD,),
    unused_blocks=("unet.a",),
    conditional_blocks=("unet.b",),
    strip_options=(WAY,),
)
VARIANT = Variant(
    cfg="sequential", max_batch=2, ffn_chunk=2**20, gradient_checkpointing=True, by_blocks=True, phases=(STRETCH,)
)
FOOTPRINT = Footprint(
    pipeline="FluxPipeline",
    components=(COMPONENT,),
    request=REQUEST,
    steps=20,
    phases=(STRETCH,),
    variants=(VARIANT,),
    caches={"unet": StepCache(strategy="text-kv")},
    kept=(CacheTrace(component="unet", strategy="text-kv", steps=20, device_bytes=7),),
    not_measured=("variants",),
    from_call_log=True,
)
REASON = Reason(decision="transformer streamed", because="it is larger than “the card”", detail=True)
VAE = VaePlan(slicing=True, strips=2**28, feature_maps="host", tile=512, shared=False, overlap=0.125)
PART = NetworkPart(
    first="transformer_blocks.1", outside=("proj_out",), placement="stream", offload_to="disk", weight_memory=3 * 2**30,
    granularity="layer", ring_buffer=2**29, resident_layers=("transformer_blocks.1.attn",),
)  # fmt: skip
CACHE = StepCache(
    strategy="teacache", threshold=0.3, most_skipped=2, coefficients=(2.0, 1.0), first_blocks=2, last_blocks=1,
    warm_up=3, cool_down=2, skipped_steps=(4, 6), keep_on="host",
)  # fmt: skip
SERIES = StepCache(strategy="taylorseer", interval=4, order=2)
MAGNITUDES = StepCache(strategy="magcache", magnitudes=(1.0, 0.9))
ATTENTION_KEPT = StepCache(strategy="pab", cross_interval=4)
GUIDANCE_KEPT = StepCache(
    strategy="faster-cache", guidance_interval=3, weight=0.3, low_frequencies=1.2, high_frequencies=1.3
)
FILTERED = StepCache(strategy="sea-cache", filters="latents", exponent=3.0)
STORED = ComponentPlan(
    device="cuda:0",
    split={"cuda:1": PART},
    placement="stream",
    offload_to="disk",
    pinned=False,
    weight_memory=4 * 2**30,
    granularity="block",
    ring_buffer=2**30,
    resident_layers=("transformer_blocks.0", "proj_out"),
    storage="float8_e4m3fn",
    compute_dtype="bfloat16",
    skip_patterns=("norm", "^proj_out$"),
    channels_last=True,
    gradient_checkpointing=True,
    max_batch=2,
    cfg="batched",
    ffn_chunk=2**20,
    attention="chunked",
)
STEPS_KEPT = ComponentPlan(cache=CACHE)
TRACED = ComponentPlan(exported="unet.trace", compiled=True)
STINT = ComponentRun(component="vae", method="decode", runs=2, unused_blocks=("encoder", "quant_conv"), prefetch=2**20)
FORECAST = PhaseForecast(name="denoise", seconds=1.5, peak_bytes=68, other_devices={"cuda:0": 7})
DEVICE_MAP = DeviceMap(strategy="balanced", components={"vae": "cpu"}, ignored=("cuda:7",))
PLAN = Plan(
    device="cuda:1", level=3, request=REQUEST, budget=BUDGET, components={"transformer": STORED}, vae=VAE,
    device_map=DEVICE_MAP, offload_activations=True, context=2, context_attention="ring", cfg_groups=2,
    rank_shares=(1.0, 0.5, 1.0, 0.5),
    expandable_segments=True, schedule=(STINT,), reasons=(REASON,), forecast=(FORECAST,),
)  # fmt: skip
SAMPLE = Sample(seconds=0.25, weights=3, activations=4)
PHASE = PhaseTrace(
    name="denoise", start=0.1, seconds=2.5, peak_bytes=9, peak_weights=8, peak_reserved=10, bytes_in=7,
    bytes_out=6, runs=20, on_demand=3, seconds_waiting=0.5, other_devices={"cuda:0": 7},
)  # fmt: skip
CACHED = CacheTrace(
    component="transformer", strategy="first-block", steps=20, skipped_steps=(3, 5), device_bytes=7, host_bytes=8,
    loaded_in_vain=9,
)  # fmt: skip
TRACE = Trace(
    call=2, device="cuda:1", seconds=3.5, phases=(PHASE,), samples=(SAMPLE,), other_bytes=4, rss_peak_bytes=5,
    caches=(CACHED,), lossy=("fp8",), notes=("it rained",),
)  # fmt: skip
LIVED = PhaseMeasurement(
    name="denoise", runs=20, predicted_seconds=2.0, seconds=2.5, predicted_bytes=8, peak_bytes=9, activations=1,
    peak_reserved=10, time_scale=1.25, extra_bytes=3,
)  # fmt: skip
EXPERIENCE = CallMeasurement(plan="c0ffee", first_call=True, stored={"unet": "int8"}, phases=(LIVED,))
PREDICTION = Prediction(
    model="sdxl", card="rtx3060", capacity=11, other_devices={"cuda:0": 8}, needed_bytes=10, fits=True, plan=PLAN,
    trace=TRACE, simulated=True, host_seconds={"denoise": 0.5}, dtype="float16", steps=20, rates="learned",
    would_fit="512 MiB", sent_bytes=7,
)  # fmt: skip
EXAMPLES = [
    REQUEST, BUDGET, BUDGETS, CARD, MACHINE, UNIT, COMPONENT, WORKLOAD, TURN, USE, PASS, LEG, WAY, STRETCH, VARIANT,
    FOOTPRINT, REASON, VAE, PART, CACHE, SERIES, MAGNITUDES, ATTENTION_KEPT, GUIDANCE_KEPT, FILTERED, STORED,
    STEPS_KEPT, TRACED, STINT,
    FORECAST, DEVICE_MAP, PLAN, SAMPLE, PHASE, CACHED, TRACE, LIVED,
    EXPERIENCE, PREDICTION,
]  # fmt: skip

each = pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)


def test_there_is_an_example_of_each_record() -> None:
    found = [kind for module in (footprint, machine, plan, results) for kind in vars(module).values()]
    kinds = {kind for kind in found if isinstance(kind, type) and issubclass(kind, Record)}
    assert {type(record) for record in EXAMPLES} == kinds - {Record}


@pytest.mark.parametrize("kind", dict.fromkeys(map(type, EXAMPLES)), ids=lambda kind: kind.__name__)
def test_the_examples_leave_no_field_at_its_default(kind: type[Record]) -> None:
    of_a_kind = [record for record in EXAMPLES if type(record) is kind]
    for name, field in kind.model_fields.items():
        assert any(getattr(record, name) != field.default for record in of_a_kind), name


# to text and back


@each
def test_round_trip_by_mapping(record: Record) -> None:
    assert type(record).from_mapping(record.to_mapping()) == record


@each
def test_round_trip_by_json(record: Record) -> None:
    assert type(record).from_text(record.to_json()) == record
    assert type(record).from_text(record.to_json(indent=2)) == record


@each
def test_round_trip_by_yaml(record: Record) -> None:
    assert type(record).from_text(record.to_yaml()) == record


@each
def test_text_is_what_other_programs_read(record: Record) -> None:
    assert json.loads(record.to_json()) == yaml.safe_load(record.to_yaml()) == record.to_mapping()


@each
def test_round_trip_through_the_cache(record: Record) -> None:
    """Its files leave out what is at its default: nothing of one, and everything that may be of the other."""
    kind, required = type(record), {name for name, field in type(record).model_fields.items() if field.is_required()}
    least = {
        name: getattr(record, name)
        for name in required | {Budget: {"device", "devices", "ram"}, StepCache: {"magnitudes"}}.get(kind, set())
    }
    for each in (record, kind.model_validate(least)):
        keep(each, {"of": "test_records"})
        assert lookup(kind, {"of": "test_records"}) == each


def test_yaml_is_written_for_people() -> None:
    assert PLAN.to_yaml().splitlines()[:6] == [
        "device: cuda:1", "level: 3", "request:", "  height: 768", "  width: 512", "  frames: 81"
    ]  # fmt: skip
    assert "“the card”" in PLAN.to_yaml()


def test_a_file_gives_its_fields(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("level: 2\nvae: {tile: 256}\n")
    assert Plan.fields_from_file(tmp_path / "plan.yaml") == {"level": 2, "vae": {"tile": 256}}
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    assert Plan.from_mapping(Plan.fields_from_file(str(tmp_path / "plan.json"))) == PLAN


def test_equal_records_have_equal_hashes() -> None:
    again = Plan.from_text(PLAN.to_json())
    assert again == PLAN
    assert len({PLAN, again, Plan()}) == 2


def test_fields_left_out_take_their_defaults() -> None:
    assert Plan.from_text("vae: {tile: 64}") == Plan(vae=VaePlan(tile=64))
    assert Request() == Request(height=None, width=None, frames=None, batch=1, steps=None, guidance=None)


@pytest.mark.parametrize("size", ["8GB", "8000000000", 8 * 10**9, 8e9])
def test_a_budget_is_a_size_in_words_or_bytes(size: Any) -> None:
    assert Budget(device=size).device == 8 * 10**9
    assert Budget.from_text(f"ram: {size}").ram == 8 * 10**9


@pytest.mark.parametrize("size", ["8GB", "8000000000", 8 * 10**9, 8e9])
def test_room_for_weights_is_a_size_in_words_or_bytes(size: Any) -> None:
    assert ComponentPlan(placement="stream", weight_memory=size).weight_memory == 8 * 10**9
    assert ComponentPlan.from_text(f"placement: stream\nweight_memory: {size}").weight_memory == 8 * 10**9


@pytest.mark.parametrize(("said", "meant"), [("auto", None), (None, None), (True, True), (False, False)])
def test_a_layout_may_be_left_open(said: Any, meant: bool | None) -> None:
    chosen = ComponentPlan.from_mapping({"channels_last": said})
    assert chosen.channels_last is meant
    assert ("channels-last" in chosen.described) == bool(meant)
    assert ComponentPlan.from_text(chosen.to_yaml()) == chosen


# plans of every kind

# what names are made of; not beyond U+FFFF, where JSON writes pairs of surrogates, which YAML's reader does not join
TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["C", "Zl", "Zp"]), max_size=20)
SIDES = st.none() | st.integers(1, 10**5)
NAMES = st.none() | st.lists(TEXT, max_size=3).map(tuple)
PLACED = st.fixed_dictionaries({"placement": st.sampled_from(["resident", "offload"])}) | st.fixed_dictionaries(
    {"placement": st.just("stream")},
    optional={
        "weight_memory": st.none() | st.integers(1, 2**60),
        "granularity": st.sampled_from([None, "block", "layer"]),
        "ring_buffer": st.none() | st.integers(0, 2**60),
        "resident_layers": NAMES,
    },
)
IN_EIGHT_BITS = st.fixed_dictionaries(
    {"storage": st.sampled_from(["float8_e4m3fn", "float8_e5m2", "int8"])},
    optional={"compute_dtype": st.sampled_from([None, "float32", "float16", "bfloat16"]), "skip_patterns": NAMES},
)
KEPT = st.fixed_dictionaries(
    {},
    optional={
        "offload_to": st.sampled_from(["cpu", "disk"]),
        "pinned": st.none() | st.booleans(),
        "channels_last": st.none() | st.booleans(),
        "max_batch": st.none() | st.integers(1, 99),
        "cfg": st.sampled_from([None, "batched"]),
        "ffn_chunk": st.none() | st.integers(1, 2**40),
        "attention": st.sampled_from(["auto", "torch", "chunked", "flash"]),
    },
)
COMPONENT_PLANS = st.builds(
    lambda *fields: ComponentPlan(**{name: value for some in fields for name, value in some.items()}),
    PLACED,
    st.just({}) | IN_EIGHT_BITS,
    KEPT,
)
VAE_PLANS = st.builds(VaePlan, slicing=st.booleans()) | st.builds(
    VaePlan,
    slicing=st.booleans(),
    tile=st.integers(16, 10**5),
    overlap=st.floats(0, 0.5),
    strips=st.integers(1, 2**40),
    feature_maps=st.sampled_from(["device", "host", "recompute"]),
)
REQUESTS = st.builds(
    Request, height=SIDES, width=SIDES, frames=SIDES, batch=st.integers(1, 99), steps=SIDES,
    guidance=st.none() | st.floats(0, 1e300),
)  # fmt: skip
PLANS = st.builds(
    Plan,
    device=TEXT,
    level=st.none() | st.integers(0, 3),
    request=st.none() | REQUESTS,
    budget=st.none() | st.builds(Budget, device=st.integers(1, 2**60), ram=st.none() | st.integers(1, 2**60)),
    components=st.dictionaries(TEXT, COMPONENT_PLANS, max_size=3),
    vae=VAE_PLANS,
    offload_activations=st.booleans(),
    reasons=st.lists(st.builds(Reason, decision=TEXT, because=TEXT), max_size=3).map(tuple),
)


@settings(deadline=None)
@given(PLANS)
def test_any_plan_goes_to_text_and_back(plan: Plan) -> None:
    assert Plan.from_text(plan.to_json()) == plan
    assert Plan.from_text(plan.to_yaml()) == plan


@settings(deadline=None)
@given(PLANS)
def test_a_plan_is_lossless_where_nothing_is_stored_or_tiled(plan: Plan) -> None:
    stored = any(component.storage != "as-loaded" for component in plan.components.values())
    sides = [plan.request.height, plan.request.width] if plan.request else [None]
    tiled = plan.vae.tile is not None and any((side or math.inf) > plan.vae.tile for side in sides)
    assert plan.lossless == (not stored and not tiled)
    assert ("  lossless" in str(plan).splitlines()) == plan.lossless


# frozen, equal by value


@each
def test_no_field_can_be_set(record: Record) -> None:
    for name in type(record).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(record, name, getattr(record, name))
        with pytest.raises(ValidationError, match="frozen"):
            delattr(record, name)
    with pytest.raises(ValidationError, match="frozen"):
        record.extra = 1  # type: ignore[attr-defined]


@each
def test_records_are_equal_by_value(record: Record) -> None:
    assert type(record)(**dict(record)) == record
    for name, field in type(record).model_fields.items():
        changed = record.model_copy(update={name: field.default})
        assert (changed == record) == (getattr(record, name) == field.default)


def test_records_of_plain_values_can_be_keys() -> None:
    assert {REQUEST: 1, BUDGET: 2}[Request(**dict(REQUEST))] == 1


def test_lists_become_tuples() -> None:
    given = {"call": 1, "seconds": 1.0, "phases": [PHASE.to_mapping()], "notes": ["a"]}
    trace = Trace.from_mapping(given)
    assert trace.phases == (PHASE,)
    assert trace.notes == ("a",)


def test_records_do_not_share_their_defaults() -> None:
    assert Plan().components is not Plan().components


def test_what_was_given_can_change_afterwards() -> None:
    fields: dict[str, Any] = {"components": {"vae": {"placement": "offload"}}}
    plan = Plan.from_mapping(fields)
    fields["components"]["unet"] = {}
    fields["components"]["vae"]["placement"] = "resident"
    assert plan == Plan(components={"vae": ComponentPlan(placement="offload")})


# what is illegal

NO_BUDGET = "a budget needs device bytes, RAM bytes or both, e.g. Budget(device='8GB')"
NO_SIZE = "is not a size: write it like 8GB (10⁹ bytes each) or 8GiB (2³⁰)"
NO_INTEGER = "must be a valid integer"
STORAGES = "storage must be 'as-loaded', 'float8_e4m3fn', 'float8_e5m2' or 'int8', not "
DTYPES = "compute_dtype must be 'float32', 'float16' or 'bfloat16', not "
PER_UNIT_ONLY = "only means something with placement=stream"
STREAMED = dict.fromkeys(("weight_memory", "granularity", "ring_buffer", "resident_layers"))
STORED_ONLY = "needs storage=float8_e4m3fn, float8_e5m2 or int8"
PLACEMENTS = "placement must be 'resident', 'offload' or 'stream', not "
DEPTHS = [  # a wrong field of a record at each depth: where, and the sentence
    (Request, {"heigth": 512}, "unknown field of Request 'heigth': did you mean 'height'?"),
    (
        Request,
        {"q": 1},
        "unknown field of Request 'q': there are arguments, backward, batch, frames, guidance, height, steps, width",
    ),
    (Budget, {"devcie": 1}, "unknown field of Budget 'devcie': did you mean 'device'?"),
    (Plan, {"levle": 1}, "unknown field of Plan 'levle': did you mean 'level'?"),
    (Plan, {"vae": {"tiel": 1}}, "unknown field of VaePlan 'tiel': did you mean 'tile'?"),
    (Plan, {"request": {"stpes": 1}}, "unknown field of Request 'stpes': did you mean 'steps'?"),
    (Plan, {"budget": {"rma": 1}}, "unknown field of Budget 'rma': did you mean 'ram'?"),
    (Plan, {"components": {"vae": {"storge": 1}}}, "unknown field of ComponentPlan 'storge': did you mean 'storage'?"),
    (Plan, {"reasons": [{"decison": 1}]}, "unknown field of Reason 'decison': did you mean 'decision'?"),
    (Footprint, {"pipelin": 1}, "unknown field of Footprint 'pipelin': did you mean 'pipeline'?"),
    (Footprint, {"components": [{"rol": 1}]}, "unknown field of Component 'rol': did you mean 'role'?"),
    (
        Footprint,
        {"components": [{"blocks": [{"byts": 1}]}]},
        "unknown field of WeightBlock 'byts': did you mean 'bytes'?",
    ),
    (Machine, {"accelerator": []}, "unknown field of Machine 'accelerator': did you mean 'accelerators'?"),
    (Machine, {"accelerators": [{"knd": 1}]}, "unknown field of Accelerator 'knd': did you mean 'kind'?"),
    (Trace, {"secnds": 1}, "unknown field of Trace 'secnds': did you mean 'seconds'?"),
    (Trace, {"phases": [{"strat": 1}]}, "unknown field of PhaseTrace 'strat': did you mean 'start'?"),
    (Trace, {"samples": [{"wieghts": 1}]}, "unknown field of Sample 'wieghts': did you mean 'weights'?"),
]


def completed(kind: type[Record], fields: Any) -> Any:
    """`fields` over an example of `kind`, records inside it too, so that only what `fields` has wrong is wrong."""
    example = next(record for record in EXAMPLES if type(record) is kind).to_mapping()
    return laid_over(example, fields)


def laid_over(example: Any, fields: Any) -> Any:
    if isinstance(example, dict) and isinstance(fields, dict):
        return example | {key: laid_over(example.get(key), value) for key, value in fields.items()}
    if isinstance(example, list) and isinstance(fields, list) and example and fields:
        return [laid_over(example[0], value) for value in fields]
    return fields


def complaint(kind: type[Record], fields: Any) -> InputError:
    with pytest.raises(InputError) as error:
        kind.from_mapping(fields)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)
    return error.value


@pytest.mark.parametrize(("kind", "fields", "message"), DEPTHS)
def test_an_unknown_field_is_named_with_the_nearest(kind: type[Record], fields: Any, message: str) -> None:
    error = complaint(kind, completed(kind, fields))
    assert str(error) == message
    assert repr(error.facts["field"]) in message


def test_unknown_fields_are_checked_in_every_record() -> None:
    for record in EXAMPLES:
        assert f"unknown field of {type(record).__name__} 'zzz'" in str(
            complaint(type(record), record.to_mapping() | {"zzz": 1})
        )


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Request, {"height": 0}, "height must be greater than 0, not 0"),
        (Request, {"width": -8}, "width must be greater than 0, not -8"),
        (Request, {"frames": 0}, "frames must be greater than 0, not 0"),
        (Request, {"batch": 0}, "batch must be greater than 0, not 0"),
        (Request, {"batch": None}, "batch must be a valid integer, not None"),
        (Request, {"steps": 0}, "steps must be greater than 0, not 0"),
        (Request, {"steps": 2.5}, "steps must be a valid integer, not 2.5"),
        (Request, {"height": True}, "height must be a valid integer, not True"),
        (Request, {"guidance": True}, "guidance must be a valid number, not True"),
        (Request, {"height": "tall"}, f"height {NO_INTEGER}, not 'tall'"),
        (Request, {"guidance": -1}, "guidance must be greater than or equal to 0, not -1"),
        (Request, {"guidance": math.nan}, "guidance must be a finite number, not nan"),
        (Request, {"guidance": math.inf}, "guidance must be a finite number, not inf"),
        (Budget, {"device": None, "ram": None}, NO_BUDGET),
        (Budget, {"device": 0}, "device must be greater than 0, not 0"),
        (Budget, {"device": True}, "device must be a valid integer, not True"),
        (Budget, {"device": 0.5}, "device must be a valid integer, not 0.5"),
        (Budget, {"device": -1}, "device must be greater than 0, not -1"),
        (Budget, {"ram": "lots"}, f"'lots' {NO_SIZE}"),
        (Budget, {"ram": "0GB"}, "a size must be at least one byte, not '0GB'"),
        (Accelerator, {"bytes": 0}, "bytes must be greater than 0, not 0"),
        (Accelerator, {"memory_rate": 0}, "memory_rate must be greater than 0, not 0"),
        (Accelerator, {"link_rate": math.inf}, "link_rate must be a finite number, not inf"),
        (Accelerator, {"arithmetic_rates": {"bfloat16": "fast"}}, "arithmetic_rates.bfloat16 must be a valid number"),
        (Machine, {"cores": 0}, "cores must be greater than 0, not 0"),
        (Machine, {"ram": 0}, "ram must be greater than 0, not 0"),
        (WeightBlock, {"bytes": -1}, "bytes must be greater than or equal to 0, not -1"),
        (Component, {"role": "painter"}, "role must be 'encoder', 'denoiser', 'autoencoder' or 'other', not 'painter'"),
        (Component, {"blocks": [{"bytes": -2}]}, "bytes must be greater than or equal to 0, not -2"),
        (VaePlan, {"tile": 8}, "tile must be greater than or equal to 16, not 8"),
        (VaePlan, {"overlap": -0.1}, "overlap must be greater than or equal to 0, not -0.1"),
        (VaePlan, {"overlap": 0.6}, "overlap must be less than or equal to 0.5, not 0.6"),
        (VaePlan, {"tile": None, "overlap": 0.1}, "vae.overlap=0.1 needs a tile size too, e.g. vae.tile=512"),
        (ComponentPlan, {"placement": "somewhere"}, f"{PLACEMENTS}'somewhere'"),
        (ComponentPlan, {"placement": None}, f"{PLACEMENTS}None"),
        (ComponentPlan, {"storage": "int4"}, f"{STORAGES}'int4'"),
        (ComponentPlan, {"compute_dtype": "int8"}, f"{DTYPES}'int8'"),
        (ComponentPlan, {"storage": "as-loaded", "compute_dtype": None}, f"skip_patterns {STORED_ONLY}"),
        (
            ComponentPlan,
            {"storage": "as-loaded", "compute_dtype": None, "skip_patterns": []},
            f"skip_patterns {STORED_ONLY}",
        ),
        (ComponentPlan, {"storage": "as-loaded", "skip_patterns": None}, f"compute_dtype {STORED_ONLY}"),
        (ComponentPlan, {"offload_to": "moon"}, "offload_to must be 'cpu' or 'disk', not 'moon'"),
        (ComponentPlan, {"offload_to": None}, "offload_to must be 'cpu' or 'disk', not None"),
        (ComponentPlan, {"pinned": "perhaps"}, "pinned must be a valid boolean"),
        (ComponentPlan, {"channels_last": "fast"}, "channels_last must be a valid boolean"),
        (ComponentPlan, {"weight_memory": 0}, "weight_memory must be greater than 0, not 0"),
        (ComponentPlan, {"weight_memory": True}, "weight_memory must be a valid integer, not True"),
        (ComponentPlan, {"weight_memory": "lots"}, f"'lots' {NO_SIZE}"),
        (ComponentPlan, {"granularity": "tensor"}, "granularity must be 'block' or 'layer', not 'tensor'"),
        (ComponentPlan, {"ring_buffer": -1}, "ring_buffer must be greater than or equal to 0, not -1"),
        (ComponentPlan, {"resident_layers": [1]}, "must be a valid string, not 1"),
        *[
            (ComponentPlan, STREAMED | {"placement": other, field: value}, f"{field} {PER_UNIT_ONLY}")
            for other in ("resident", "offload")
            for field, value in {
                "weight_memory": 1,
                "granularity": "layer",
                "ring_buffer": 0,
                "resident_layers": [],
            }.items()
        ],
        (WeightBlock, {"name": None}, "name must be a valid string, not None"),
        (
            StripStageProfile,
            {"strips": 2, "layer_work": [{"layer": "a", "work": []}], "strip_counts": [], "strip_ends": []},
            "1 layers in 2 strips cannot run in [] of them before []",
        ),
        (
            StripStageProfile,
            {"strips": 2, "layer_work": [{"layer": "a", "work": []}], "strip_counts": [3], "strip_ends": [2]},
            "cannot run in [3] of them before [2]",
        ),
        (
            StripStageProfile,
            {"strips": 2, "layer_work": [{"layer": "a", "work": []}], "strip_counts": [1], "strip_ends": [3]},
            "cannot run in [1] of them before [3]",
        ),
        (Component, {"layers": [{"bytes": -2}]}, "bytes must be greater than or equal to 0, not -2"),
        (Plan, {"level": -1}, "level must be greater than or equal to 0, not -1"),
        (Plan, {"level": True}, "level must be a valid integer, not True"),
        (Plan, {"level": 4}, "level must be less than or equal to 3, not 4"),
        (Plan, {"level": "three"}, f"level {NO_INTEGER}, not 'three'"),
        (Plan, {"offload_activations": "perhaps"}, "offload_activations must be a valid boolean"),
        (Plan, {"vae": {"tile": 15}}, "tile must be greater than or equal to 16, not 15"),
        (Plan, {"vae": None}, "vae must be a valid dictionary or instance of VaePlan, not None"),
        (Plan, {"components": [1]}, "components must be a valid dictionary, not [1]"),
        (Plan, {"components": {"transformer": {"placement": "x"}}}, f"{PLACEMENTS}'x'"),
        (Plan, {"request": {"height": 0}}, "height must be greater than 0, not 0"),
        (Plan, {"budget": {"device": "8 gigs"}}, f"'8 gigs' {NO_SIZE}"),
        (Sample, {"weights": -1}, "weights must be greater than or equal to 0, not -1"),
        (PhaseTrace, {"runs": 0}, "runs must be greater than 0, not 0"),
        (PhaseTrace, {"seconds": -0.5}, "seconds must be greater than or equal to 0, not -0.5"),
        (PhaseTrace, {"on_demand": -1}, "on_demand must be greater than or equal to 0, not -1"),
        (PhaseTrace, {"seconds_waiting": -0.5}, "seconds_waiting must be greater than or equal to 0, not -0.5"),
        (Trace, {"call": 0}, "call must be greater than 0, not 0"),
        (Trace, {"seconds": math.nan}, "seconds must be a finite number, not nan"),
        (Trace, {"phases": [{"peak_bytes": -1}]}, "peak_bytes must be greater than or equal to 0, not -1"),
    ],
)
def test_an_illegal_value_is_named_with_what_would_be_legal(kind: type[Record], fields: Any, message: str) -> None:
    assert message in str(complaint(kind, completed(kind, fields)))


def test_a_long_value_is_cut_short() -> None:
    assert len(str(complaint(Plan, {"level": "x" * 10_000}))) < 200


@each
def test_a_missing_field_is_named(record: Record) -> None:
    for name, field in type(record).model_fields.items():
        if field.is_required():
            fields = {key: value for key, value in record.to_mapping().items() if key != name}
            error = complaint(type(record), fields)
            assert str(error) == f"{name} is missing from {type(record).__name__}"
            assert error.facts == {"field": name}


def test_what_is_wrong_with_a_request_is_a_request_error() -> None:
    assert type(complaint(Request, {"height": 0})) is RequestError
    assert type(complaint(Plan, {"request": {"heigth": 1}})) is RequestError
    assert type(complaint(Plan, {"level": 4})) is PlanError
    assert RequestError.exit_code == PlanError.exit_code == 2


def test_numbers_go_along_with_the_message() -> None:
    assert complaint(Plan, {"level": 4}).facts == {"field": "level", "given": "4"}
    assert complaint(VaePlan, {"overlap": 0.1}).facts == {"overlap": 0.1}
    assert complaint(ComponentPlan, {"skip_patterns": ["norm"]}).facts == {"field": "skip_patterns"}
    assert complaint(Budget, {"ram": "lots"}).facts == {"size": "lots"}


@pytest.mark.parametrize("fields", [None, 3, "level: 3", [("level", 3)], {3: "level"}])
def test_only_a_mapping_has_fields(fields: object) -> None:
    with pytest.raises(PlanError, match=r"a plan is a mapping of fields to values, not "):
        Plan.from_mapping(fields)
    with pytest.raises(RequestError, match=r"a request is a mapping of fields to values, not "):
        Request.from_mapping(fields)


@pytest.mark.parametrize("text", ["", "level", "- level", "3: 1", "null", "[]"])
def test_text_without_fields_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="a plan is a mapping of fields to values, not "):
        Plan.from_text(text)


@pytest.mark.parametrize(
    "text", ["{", "level: [", "a: b: c", "%", "level: 1\n\tvae: 2", "\0", "[" * 5000, "x: !!python/name:os.system"]
)
def test_text_of_another_kind_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(PlanError, match="this is neither JSON nor YAML: ") as error:
        Plan.from_text(text)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "plan.bin"
    binary.write_bytes(b"\xff\xfe\xfa")
    for path, cause in ((tmp_path / "none", "No such file"), (tmp_path, "it is a folder"), (binary, "can't decode")):
        with pytest.raises(PlanError) as error:
            Plan.fields_from_file(path)
        assert str(error.value).startswith(f"cannot read the plan {path}: ")
        assert cause in str(error.value)
        assert error.value.facts == {"path": str(path)}


# lossy and lossless


def test_placement_streaming_slicing_and_layout_are_lossless() -> None:
    moved = ComponentPlan(placement="stream", channels_last=True)
    plan = Plan(level=3, components={"unet": moved}, vae=VaePlan(slicing=True), offload_activations=True)
    assert plan.lossy == ()
    assert plan.lossless


def test_stored_weights_are_lossy_and_named() -> None:
    stored = ComponentPlan(storage="float8_e5m2")
    integers = ComponentPlan(storage="int8")
    plan = Plan(components={"unet": stored, "vae": ComponentPlan(), "text_encoder": STORED, "transformer": integers})
    assert plan.lossy == (
        "fp8: unet is stored in float8_e5m2",
        "fp8: text_encoder is stored in float8_e4m3fn",
        "int8: transformer is stored in int8",
    )
    assert not plan.lossless


@pytest.mark.parametrize(
    ("request_", "lossless"),
    [
        (None, False),
        (Request(), False),  # the pipeline's own size, which may be larger
        (Request(height=512), False),
        (Request(width=512), False),
        (Request(height=512, width=512), True),
        (Request(height=8, width=512), True),
        (Request(height=513, width=512), False),
        (Request(height=512, width=513), False),
        (Request(height=512, width=512, frames=81, batch=4), True),
    ],
)
def test_tiles_are_lossy_where_a_picture_needs_more_than_one(request_: Request | None, lossless: bool) -> None:
    plan = Plan(vae=VaePlan(tile=512), request=request_)
    assert plan.lossless is lossless
    assert plan.lossy == (() if lossless else ("blended-tiling: pictures larger than 512 px are decoded in tiles",))


def test_everything_lossy_goes_by_a_name_that_can_be_allowed() -> None:
    plan = Plan(components={"unet": STORED}, vae=VaePlan(tile=64))
    assert [text.partition(":")[0] for text in plan.lossy] == ["fp8", "blended-tiling"]
    assert {"fp8", "int8", "sage-attention", "blended-tiling", "step-cache"} == set(TECHNIQUES)
    sage = Plan(components={"unet": ComponentPlan(attention="sage")})
    assert sage.lossy == ("sage-attention: attention of unet",)


def test_techniques_are_known_by_name() -> None:
    assert check_techniques(["fp8", "blended-tiling"]) == ("fp8", "blended-tiling")
    assert check_techniques("fp8") == ("fp8",)
    assert check_techniques(iter(())) == ()
    with pytest.raises(PlanError, match=r"unknown technique 'fp9': did you mean 'fp8'\?") as error:
        check_techniques(["fp8", "fp9"])
    assert error.value.facts == {"name": "fp9"}
    with pytest.raises(
        PlanError, match="unknown technique 'pruned': there are blended-tiling, fp8, int8, sage-attention, step-cache"
    ):
        check_techniques("pruned")


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        (["vae", "unet"], "unknown part 'nuet': did you mean 'unet'?"),
        (["vae", "moon"], "unknown part 'nuet': there are moon, vae"),
        (["vae"], "unknown part 'nuet': there is vae"),
        ([], "unknown part 'nuet': there are none"),
    ],
)
def test_an_unknown_name_comes_with_the_nearest_or_all(known: list[str], sentence: str) -> None:
    assert unknown_name("part", "nuet", known) == sentence


# as text for people


def test_a_plan_says_everything_it_decides() -> None:
    assert str(PLAN).splitlines() == [
        "plan: level 3 on cuda:1",
        "  transformer: on cuda:0, transformer_blocks.1 and later on cuda:1 (stream), stream, from disk, by block, "
        "2 resident, ring buffer of 1 GiB, "
        "stored as float8_e4m3fn, channels-last, at most 2 items at a time, batched guidance, "
        "feed-forward within 1 MiB, gradient checkpointing on, attention by chunked",
        "  autoencoder: exact strips within 256 MiB, feature maps kept in host memory, "
        "tiles of 512 px where strips are not possible, one item at a time, on every rank",
        "  activations for later blocks: offloaded to host memory",
        "  2 ranks share the rows as 1 : 0.5 : 1 : 0.5, attention ring",
        "  2 groups of ranks, one for each guidance prediction",
        "  lossy: fp8: transformer is stored in float8_e4m3fn",
        "  lossy: blended-tiling: pictures larger than 512 px are decoded in tiles, where they cannot be in strips",
        "  because: transformer streamed: it is larger than “the card”",
    ]
    assert TRACED.described == "resident, compiled, as exported in unet.trace"
    assert str(Plan()).splitlines() == ["plan: custom on cpu", "  autoencoder: whole images", "  lossless"]


def test_a_trace_says_its_peak() -> None:
    phases = tuple(PhaseTrace(name="p", start=0, seconds=1, peak_bytes=peak * 2**20) for peak in (3, 7, 5))
    assert Trace(seconds=3, phases=phases).peak_bytes == 7 * 2**20
    assert Trace(seconds=3, phases=()).peak_bytes == 0
    assert str(Trace(call=4, device="cuda:0", seconds=3.14159, phases=phases)) == "call 4 on cuda:0: 3.14 s, peak 7 MiB"


def test_json_that_yaml_would_misread() -> None:
    assert Plan.from_text(Plan(device="😀").to_json()) == Plan(device="😀")
    assert Plan.from_text('{\n\t"level": 2\n}').level == 2


def test_equal_work_is_one_object_and_what_is_invalid_is_refused_as_before() -> None:
    group = {"kind": "matmul", "dtype": "float16", "operations": 1, "traffic": 2, "kernels": 3}
    first, other = (LayerWork.from_mapping({"layer": name, "work": [dict(group), dict(group)]}) for name in "ab")
    assert first.work is other.work
    assert first.work[0] is first.work[1]
    assert LayerWork(layer="c", work=(KernelGroup(**group),)).work[0] == first.work[0]
    for wrong in ({"operations": True}, {"operations": [1]}, {"kernels": 0}, {"kind": "moon"}, {"more": 1}):
        with pytest.raises(PlanError, match=r"^work\.0\." if "more" not in wrong else "unknown field"):
            LayerWork.from_mapping({"layer": "", "work": [group | wrong]})
