"""plan_for: what each level decides, a user's own choices on top of it, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.errors import PlanError, RequestError
from tightfit.plan.presets import LEVEL_TILE, plan_for
from tightfit.schema.footprint import Component, Footprint, WeightBlock
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan, Plan, Reason, VaePlan
from tightfit.schema.request import Request

GIB = 2**30
ENCODER = Component(
    name="text_encoder", class_name="T5EncoderModel", role="encoder", bytes=9 * GIB,
    blocks=(WeightBlock(name="encoder.block.0", bytes=4 * GIB), WeightBlock(name="encoder.block.1", bytes=5 * GIB)),
    layers=(
        WeightBlock(name="encoder.block.0.wi", bytes=2 * GIB), WeightBlock(name="encoder.block.0.wo", bytes=2 * GIB),
        WeightBlock(name="encoder.block.1.wi", bytes=3 * GIB), WeightBlock(name="encoder.block.1.wo", bytes=2 * GIB),
    ),
)  # fmt: skip
BLOCKS = [f"blocks.{index}" for index in range(10)]
UP, DOWN = 3 * GIB // 2, GIB // 2
DENOISER = Component(
    name="transformer",
    class_name="FluxTransformer2DModel",
    role="denoiser",
    bytes=22 * GIB,
    blocks=(*(WeightBlock(name=block, bytes=2 * GIB) for block in BLOCKS), WeightBlock(name="", bytes=2 * GIB)),
    layers=(  # and 1 GiB of what is small
        WeightBlock(name="embedder", bytes=GIB),
        *(
            WeightBlock(name=f"{block}.{layer}", bytes=size)
            for block in BLOCKS
            for layer, size in (("up", UP), ("down", DOWN))
        ),
    ),
)
AUTOENCODER = Component(name="vae", class_name="AutoencoderKL", role="autoencoder", bytes=GIB // 4)
FLUX = Footprint(pipeline="FluxPipeline", components=(ENCODER, DENOISER, AUTOENCODER))
UNET = DENOISER.model_copy(update={"name": "unet", "has_skip_connections": True})
SD = Footprint(pipeline="StableDiffusionPipeline", components=(ENCODER, UNET, AUTOENCODER))


def plan(choices: dict[str, Any], footprint: Footprint = FLUX, *, separate: bool = True, **more: Any) -> Plan:
    return plan_for(footprint, "cuda:0" if separate else "cpu", separate=separate, choices=choices, **more)


def placements(plan: Plan) -> dict[str, str]:
    return {name: component.placement for name, component in plan.components.items()}


def decisions(plan: Plan) -> list[str]:
    return [reason.decision for reason in plan.reasons]


def test_level_0_keeps_everything_on_the_device() -> None:
    decided = plan({"level": 0})
    assert placements(decided) == {"text_encoder": "resident", "transformer": "resident", "vae": "resident"}
    assert decided.vae == VaePlan()
    assert not decided.offload_activations
    assert decided.reasons == ()
    assert decided.lossless


def test_level_1_tiles_and_slices_the_autoencoder() -> None:
    decided = plan({"level": 1})
    assert placements(decided) == placements(plan({"level": 0}))
    assert decided.vae == VaePlan(slicing=True, tile=LEVEL_TILE)
    assert not decided.offload_activations
    assert decisions(decided) == [f"tiles of {LEVEL_TILE} px", "one item at a time"]


def test_level_2_brings_encoders_for_their_phase() -> None:
    decided = plan({"level": 2})
    assert placements(decided) == {"text_encoder": "offload", "transformer": "resident", "vae": "resident"}
    assert decided.vae == plan({"level": 1}).vae
    assert not decided.offload_activations
    assert decisions(decided)[2:] == ["text_encoder offloaded"]
    assert decided.reasons[2].because == "its 9 GiB are only needed while it runs"


def test_level_3_streams_the_denoiser_and_moves_what_waits() -> None:
    decided = plan({"level": 3}, SD)
    assert placements(decided) == {"text_encoder": "offload", "unet": "stream", "vae": "offload"}
    assert decided.vae == plan({"level": 1}).vae
    assert decided.offload_activations
    placed = ["text_encoder, vae offloaded", "unet streamed"]
    assert decisions(decided)[2:] == [*placed, "skip connections of unet offloaded to host memory"]
    assert decided.reasons[2].because == "their 9 GiB and 256 MiB are only needed while each runs"
    assert decided.reasons[3].because == "one layer at a time needs 1.5 GiB of its 22 GiB"


def test_lossy_storage_and_layout_have_their_reasons_too() -> None:
    decided = plan({"components": {"unet": {"storage": "float8_e5m2", "channels_last": True}}}, SD)
    assert decisions(decided) == ["unet stored in float8_e5m2", "unet channels-last"]


@pytest.mark.parametrize(("gain", "faster"), [(None, False), (0.9, False), (1.04, False), (1.05, True), (1.3, True)])
def test_a_layout_that_is_left_open_is_settled_by_what_was_measured(gain: float | None, faster: bool) -> None:
    gains = {} if gain is None else {"denoiser.float16": gain, "autoencoder.float16": 9.0}
    here = Accelerator(name="cuda:0", kind="cuda", bytes=GIB, channels_last_gains=gains)
    unet = UNET.model_copy(update={"convolves": True, "dtypes": {"float16": 22 * GIB}})
    footprint = Footprint(pipeline="P", components=(unet, AUTOENCODER))
    for said in ("auto", None):
        choices = {"components": {name: {"channels_last": said} for name in ("unet", "vae")}}
        decided = plan(choices, footprint, accelerator=here)
        chosen = {name: component.channels_last for name, component in decided.components.items()}
        assert chosen == {"unet": faster, "vae": False}  # this autoencoder does not convolve
        assert decisions(decided) == [f"unet {'' if faster else 'not '}channels-last", "vae not channels-last"]
        again = plan(decided.to_mapping(), footprint, accelerator=here)
        assert again.model_copy(update={"reasons": ()}) == decided.model_copy(update={"reasons": ()})


def test_level_3_says_when_no_activation_waits() -> None:
    assert "no activations are offloaded" in decisions(plan({"level": 3}, FLUX))
    assert "no activations are offloaded" not in decisions(plan({"level": 3}, SD))


def test_level_3_settles_what_streams_and_how() -> None:
    settled = ComponentPlan(
        placement="stream", pinned=False, granularity="layer", ring_buffer=6 * GIB + 4 * 4096, resident_layers=()
    )
    assert plan({"level": 3}).components["transformer"] == settled  # four of the largest, and nothing stays
    for_phases = [plan({"level": 3}).components[name] for name in ("text_encoder", "vae")]
    assert for_phases == [ComponentPlan(placement="offload", pinned=False)] * 2


def test_a_denoiser_without_layers_comes_for_its_phase() -> None:
    small = Footprint(pipeline="P", components=(DENOISER.model_copy(update={"layers": ()}),))
    assert placements(plan({"level": 3}, small)) == {"transformer": "offload"}


def test_a_denoiser_without_repeated_blocks_streams_by_its_layers() -> None:
    odd = Footprint(pipeline="P", components=(DENOISER.model_copy(update={"blocks": ()}),))
    assert plan({"level": 3}, odd).components == {"transformer": plan({"level": 3}).components["transformer"]}


def test_no_level_is_level_0_and_calls_itself_custom() -> None:
    decided = plan({})
    assert decided.level is None
    assert decided.model_copy(update={"level": 0}) == plan({"level": 0})
    assert str(decided).startswith("plan: custom on cuda:0")


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_plan_names_its_level_device_and_request(level: int) -> None:
    request = Request(height=768, width=512, steps=20)
    decided = plan({"level": level}, request=request)
    assert (decided.level, decided.device, decided.request) == (level, "cuda:0", request)
    assert plan({"level": level}).request is None


# where the device's memory is the host's


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_where_nothing_can_move_nothing_moves(level: int) -> None:
    decided = plan({"level": level}, SD, separate=False)
    assert set(placements(decided).values()) == {"resident"}
    assert not decided.offload_activations
    assert decided.vae == plan({"level": level}, SD).vae  # smaller maps help everywhere


def test_where_nothing_can_move_the_reason_says_what_stayed() -> None:
    decided = plan({"level": 3}, SD, separate=False)
    assert decided.reasons[-1] == Reason(
        decision="nothing is moved (text_encoder, unet, vae)",
        because="the device computes in host memory",
    )
    only_activations = plan({"offload_activations": True}, SD, separate=False)
    assert decisions(only_activations) == ["nothing is moved (activations)"]
    assert decisions(plan({"level": 1}, SD, separate=False)) == decisions(plan({"level": 1}, SD))


def test_where_nothing_can_move_the_rest_of_the_choices_stays() -> None:
    stored = {"placement": "stream", "storage": "float8_e4m3fn", "channels_last": True}
    decided = plan({"components": {"transformer": stored}}, separate=False)
    assert decided.components["transformer"] == ComponentPlan(storage="float8_e4m3fn", channels_last=True)


@pytest.mark.parametrize("placement", ["offload", "stream"])
def test_where_nothing_can_move_weights_can_still_wait_on_the_disk(placement: str) -> None:
    on_disk = {"transformer": {"placement": placement, "offload_to": "disk"}}
    decided = plan({"level": 3, "components": on_disk}, separate=False)
    assert placements(decided) == {"text_encoder": "resident", "transformer": placement, "vae": "resident"}
    assert decided.components["transformer"] == plan({"level": 3, "components": on_disk}).components["transformer"]
    assert sorted(decisions(decided)[2:]) == [
        "nothing is moved (text_encoder, vae)",
        f"transformer {placement.rstrip('e')}ed",
    ]


# a user's own choices


def test_a_choice_changes_its_field_and_no_other() -> None:
    level = plan({"level": 2})
    decided = plan({"level": 2, "vae": {"tile": 256}, "components": {"transformer": {"placement": "stream"}}})
    assert decided.vae == VaePlan(slicing=True, tile=256)
    assert placements(decided) == placements(level) | {"transformer": "stream"}
    assert decided.level == 2


def test_a_choice_can_take_back_what_the_level_decided() -> None:
    decided = plan({"level": 3, "vae": {"tile": None, "slicing": False}, "offload_activations": False,
                    "components": {name: {"placement": "resident"} for name in placements(plan({}))}})  # fmt: skip
    assert decided.model_copy(update={"level": 0}) == plan({"level": 0})


def test_a_choice_beside_the_placement_leaves_the_placement() -> None:
    decided = plan({"level": 3, "components": {"transformer": {"storage": "float8_e5m2", "compute_dtype": "bfloat16"}}})
    streams = plan({"level": 3}).components["transformer"]
    assert decided.components["transformer"] == ComponentPlan(
        **dict(streams) | {"storage": "float8_e5m2", "compute_dtype": "bfloat16"}
    )


def test_a_choice_has_its_reason_too() -> None:
    decided = plan({"components": {"vae": {"placement": "offload"}}, "vae": {"tile": 128}})
    assert decisions(decided) == ["tiles of 128 px", "vae offloaded"]


def test_choices_are_not_changed() -> None:
    choices: dict[str, Any] = {"level": 3, "vae": {"tile": 256}, "components": {"vae": {}}, "reasons": [1]}
    plan(choices)
    assert choices == {"level": 3, "vae": {"tile": 256}, "components": {"vae": {}}, "reasons": [1]}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_reasons_are_given_anew_and_never_taken(level: int) -> None:
    stale = [{"decision": "transformer on the moon", "because": "it is there"}]
    assert plan({"level": level, "reasons": stale}) == plan({"level": level})
    assert plan({"level": level, "reasons": "nonsense"}) == plan({"level": level})


def test_room_for_weights_is_filled_with_what_stays() -> None:
    def with_room(weights: Any) -> ComponentPlan:
        return plan({"level": 3, "components": {"transformer": {"weight_memory": weights}}}).components["transformer"]

    some = with_room("16GiB")
    stay = {layer.name: layer.bytes for layer in DENOISER.layers if layer.name in (some.resident_layers or ())}
    assert (some.weight_memory, some.granularity, some.ring_buffer) == (16 * GIB, "layer", 4 * (UP + 4096))
    assert 8 * GIB <= sum(stay.values()) <= 9 * GIB  # of the 16: 6 are the ring's, and 1 is small and always there
    assert with_room(23 * GIB) == ComponentPlan(
        placement="stream", pinned=False, weight_memory=23 * GIB, granularity="layer", ring_buffer=0,
        resident_layers=tuple(layer.name for layer in DENOISER.layers),
    )  # fmt: skip
    least = with_room(5 * GIB // 2 + 4096)  # the largest one by one, with a flat buffer's padding
    assert (least.ring_buffer, least.resident_layers) == (UP + 4096, ())


# page-locked masters


def locked(choices: dict[str, Any], gib: float) -> dict[str, bool | None]:
    decided = plan(choices, pinnable=int(gib * GIB))
    return {name: component.pinned for name, component in decided.components.items()}


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (0, set()),
        (1, {"vae"}),
        (21.9, {"text_encoder", "vae"}),
        (22, {"transformer"}),
        (22.25, {"transformer", "vae"}),
        (31, {"transformer", "text_encoder"}),
        (31.25, {"transformer", "text_encoder", "vae"}),
    ],
)
def test_masters_are_page_locked_as_far_as_can_be_the_most_travelled_first(gib: float, expected: set[str]) -> None:
    assert locked({"level": 3}, gib) == {name: name in expected for name in placements(plan({}))}


def test_only_what_moves_from_host_memory_is_page_locked() -> None:
    assert locked({"level": 2}, 99) == {"text_encoder": True, "transformer": None, "vae": None}
    on_disk = {"level": 3, "components": {"transformer": {"offload_to": "disk"}}}
    assert locked(on_disk, 9.25) == {"text_encoder": True, "transformer": None, "vae": True}


@pytest.mark.parametrize("chosen", [True, False])
def test_whether_masters_are_page_locked_can_be_chosen(chosen: bool) -> None:
    choices = {"level": 3, "components": {"transformer": {"pinned": chosen}}}
    assert locked(choices, 0)["transformer"] is chosen
    assert locked(choices, 99)["transformer"] is chosen


def test_a_plan_stays_as_it_is_when_less_can_be_page_locked() -> None:
    decided = plan({"level": 3}, pinnable=99 * GIB)
    assert plan(decided.to_mapping()) == decided


# properties

ANYWHERE = {
    "channels_last": st.booleans(),
    "storage": st.sampled_from(["as-loaded", "float8_e4m3fn", "float8_e5m2", "int8"]),
    "offload_to": st.sampled_from(["cpu", "disk"]),
    "pinned": st.none() | st.booleans(),
}
KEPT = {"channels_last", "storage", "offload_to"}  # also where nothing can move
WHOLE = st.fixed_dictionaries({}, optional={"placement": st.sampled_from(["resident", "offload"]), **ANYWHERE})


def streaming(component: Component) -> st.SearchStrategy[dict[str, Any]]:
    """Per unit, with any of what can be chosen about it."""
    layers, largest = [layer.name for layer in component.layers], max(layer.bytes for layer in component.layers)
    resident = st.sets(st.sampled_from(layers)).map(lambda names: [name for name in layers if name in names])
    room = {"weight_memory": st.none() | st.integers(6 * GIB, 2 * component.bytes)}
    return st.one_of(
        st.fixed_dictionaries({"placement": st.just("stream")} | always, optional={**ANYWHERE, **room, **more})
        for always, more in (
            ({}, {"granularity": st.sampled_from([None, "block", "layer"])}),
            (
                {"resident_layers": resident},
                {"granularity": st.just("layer"), "ring_buffer": st.integers(2 * largest, 2 * component.bytes)},
            ),
        )
    )


CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "level": st.none() | st.integers(0, 3),
        "vae": st.fixed_dictionaries(
            {}, optional={"slicing": st.booleans(), "tile": st.none() | st.integers(16, 4096)}
        ),
        "offload_activations": st.booleans(),
        "components": st.fixed_dictionaries(
            {},
            optional={
                "text_encoder": WHOLE | streaming(ENCODER),
                "unet": WHOLE | streaming(UNET),
                "vae": WHOLE,
            },
        ),
        "budget": st.just({"device": "8GB"}),
    },
)


@settings(deadline=None)
@given(CHOICES, st.none() | st.builds(Request, height=st.integers(8, 2048)))
def test_a_plan_is_what_its_own_fields_plan(choices: dict[str, Any], request: Request | None) -> None:
    decided = plan(choices, SD, request=request, pinnable=25 * GIB)
    assert plan(decided.to_mapping(), SD) == decided
    assert plan(Plan.fields_from_text(decided.to_yaml()), SD) == decided


@settings(deadline=None)
@given(CHOICES)
def test_a_plan_where_nothing_can_move_is_what_its_own_fields_decide(choices: dict[str, Any]) -> None:
    decided = plan(choices, SD, separate=False)
    again = plan(decided.to_mapping(), SD, separate=False)
    assert again.model_copy(update={"reasons": ()}) == decided.model_copy(update={"reasons": ()})


@settings(deadline=None)
@given(CHOICES, st.booleans())
def test_a_plan_names_every_component_and_holds_every_choice(choices: dict[str, Any], separate: bool) -> None:
    decided = plan(choices, SD, separate=separate)
    assert list(decided.components) == ["text_encoder", "unet", "vae"]
    for name, fields in choices.get("components", {}).items():
        for field, value in fields.items():
            if value is not None and (separate or fields.get("offload_to") == "disk" or field in KEPT):
                found = getattr(decided.components[name], field)
                assert found == (tuple(value) if field == "resident_layers" else value)
    for field, value in choices.get("vae", {}).items():
        assert getattr(decided.vae, field) == value


@settings(deadline=None)
@given(CHOICES)
def test_all_is_decided_about_what_streams(choices: dict[str, Any]) -> None:
    decided = plan(choices, SD, pinnable=25 * GIB)
    for component in SD.components:
        chosen, layers = decided.components[component.name], {layer.name: layer.bytes for layer in component.layers}
        assert (chosen.pinned is None) <= (chosen.placement == "resident" or chosen.offload_to == "disk")
        if chosen.placement == "stream":
            assert chosen.granularity is not None
            assert chosen.ring_buffer is not None
            assert chosen.resident_layers is not None
            if chosen.granularity == "layer":
                passing = [size for name, size in layers.items() if name not in chosen.resident_layers]
                assert chosen.ring_buffer >= max(passing, default=0)
        else:
            assert (chosen.weight_memory, chosen.granularity, chosen.ring_buffer, chosen.resident_layers) == (
                None,
                None,
                None,
                None,
            )


@settings(deadline=None)
@given(CHOICES, st.booleans())
def test_whatever_moves_has_its_reason(choices: dict[str, Any], separate: bool) -> None:
    decided = plan(choices, SD, separate=separate)
    moved = {f"{name} {place.rstrip('e')}ed" for name, place in placements(decided).items() if place != "resident"}
    placed = [text.rpartition(" ") for text in decisions(decided)]
    told = {
        f"{name} {place}"
        for names, _, place in placed
        if place in ("offloaded", "streamed")
        for name in names.split(", ")
    }
    assert moved == told


# what is refused


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"components": {"ve": {}}}, "unknown component of FluxPipeline 've': did you mean 'vae'?"),
        ({"components": {"q": {}}}, "unknown component of FluxPipeline 'q': there are text_encoder, transformer, vae"),
        ({"components": {"vae": {"placement": "stream"}}}, "vae has no layers to stream: offload would"),
        ({"level": 4}, "level must be less than or equal to 3, not 4"),
        ({"level": -1}, "level must be greater than or equal to 0, not -1"),
        ({"level": "low"}, "level must be a valid integer, not 'low'"),
        ({"levle": 1}, "unknown field of Plan 'levle': did you mean 'level'?"),
        ({"vae": {"tiel": 256}}, "unknown field of VaePlan 'tiel': did you mean 'tile'?"),
        ({"vae": {"overlap": 0.1}}, "vae.overlap=0.1 needs a tile size too, e.g. vae.tile=512"),
        ({"components": {"vae": {"placment": "resident"}}}, "unknown field of ComponentPlan 'placment'"),
        ({"components": {"vae": {"placement": "gone"}}}, "must be 'resident', 'offload' or 'stream', not 'gone'"),
        ({"components": {"vae": "resident"}}, "components.vae must be a valid dictionary or instance of ComponentPlan"),
        ({"components": None}, "components must be a valid dictionary, not None"),
        ({"vae": 512}, "vae must be a valid dictionary or instance of VaePlan, not 512"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(choices: dict[str, Any], message: str, separate: bool) -> None:
    with pytest.raises(PlanError) as error:
        plan(choices, separate=separate)
    assert message in str(error.value)


@pytest.mark.parametrize("store", ["cpu", "disk"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"weight_memory": "2GiB"},
            "transformer: 2 GiB are too little for its weights: 1 GiB of small ones always stay,",
        ),
        (
            {"resident_layers": ["blocks.3.upp"]},
            "unknown layer of transformer 'blocks.3.upp': did you mean 'blocks.3.up'?",
        ),
        (
            {"granularity": "block", "resident_layers": ["block.3"]},
            "unknown layer of transformer 'block.3': did you mean 'blocks.3'?",
        ),
        (
            {"resident_layers": [], "ring_buffer": GIB},
            "transformer: a ring of 1 GiB cannot take its largest layer that passes through",
        ),
    ],
)
def test_what_cannot_stream_like_that_is_refused(fields: dict[str, Any], message: str, store: str) -> None:
    with pytest.raises(PlanError) as error:
        plan({"components": {"transformer": {"placement": "stream", "offload_to": store, **fields}}})
    assert message in str(error.value)
    assert error.value.facts["name"] in ("transformer", *fields.get("resident_layers", ()))


def test_an_overlap_needs_no_tile_of_its_own_where_the_level_has_one() -> None:
    assert plan({"level": 1, "vae": {"overlap": 0.1}}).vae == VaePlan(slicing=True, tile=LEVEL_TILE, overlap=0.1)


def test_an_unknown_component_is_named_in_the_facts() -> None:
    with pytest.raises(PlanError) as error:
        plan({"components": {"unett": {}}}, SD)
    assert error.value.facts == {"name": "unett"}


def test_a_request_inside_the_choices_is_checked_as_one() -> None:
    with pytest.raises(RequestError, match=r"unknown field of Request 'heigth': did you mean 'height'\?"):
        plan({"request": {"heigth": 512}})
