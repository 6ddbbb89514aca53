"""plan_for: what each level decides, a user's own choices on top of it, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.errors import PlanError, RequestError
from tightfit.plan.levels import LEVEL_TILE, plan_for
from tightfit.records import Component, ComponentPlan, Footprint, Plan, Reason, Request, Unit, VaePlan

GIB = 2**30
ENCODER = Component(
    name="text_encoder", class_name="T5EncoderModel", role="encoder", bytes=9 * GIB,
    units=(Unit(name="encoder.block.0", bytes=4 * GIB), Unit(name="encoder.block.1", bytes=5 * GIB)),
)  # fmt: skip
DENOISER = Component(
    name="transformer", class_name="FluxTransformer2DModel", role="denoiser", bytes=22 * GIB,
    units=(Unit(name="", bytes=GIB), Unit(name="blocks.0", bytes=3 * GIB), Unit(name="blocks.1", bytes=2 * GIB)),
    leaves=(Unit(name="blocks.0.up", bytes=2 * GIB), Unit(name="blocks.0.down", bytes=GIB), Unit(name="blocks.1", bytes=2 * GIB)),
)  # fmt: skip
AUTOENCODER = Component(name="vae", class_name="AutoencoderKL", role="autoencoder", bytes=GIB // 4)
FLUX = Footprint(pipeline="FluxPipeline", components=(ENCODER, DENOISER, AUTOENCODER))
UNET = DENOISER.model_copy(update={"name": "unet", "skips": True})
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
    assert placements(decided) == {"text_encoder": "per-phase", "transformer": "resident", "vae": "resident"}
    assert decided.vae == plan({"level": 1}).vae
    assert not decided.offload_activations
    assert decisions(decided)[2:] == ["text_encoder per-phase"]
    assert decided.reasons[2].because == "its 9 GiB are only needed while it works"


def test_level_3_streams_the_denoiser_and_moves_what_waits() -> None:
    decided = plan({"level": 3}, SD)
    assert placements(decided) == {"text_encoder": "per-phase", "unet": "per-unit", "vae": "per-phase"}
    assert decided.vae == plan({"level": 1}).vae
    assert decided.offload_activations
    placed = ["text_encoder per-phase", "unet per-unit", "vae per-phase"]
    assert decisions(decided)[2:] == [*placed, "skips of unet moved to host memory"]
    assert decided.reasons[3].because == "one unit at a time needs 3 GiB of its 22 GiB"


def test_lossy_storage_and_layout_have_their_reasons_too() -> None:
    decided = plan({"components": {"unet": {"storage": "float8_e5m2", "channels_last": True}}}, SD)
    assert decisions(decided) == ["unet stored in float8_e5m2", "unet channels-last"]


def test_level_3_says_when_no_activation_waits() -> None:
    assert "no activations are moved" in decisions(plan({"level": 3}, FLUX))
    assert "no activations are moved" not in decisions(plan({"level": 3}, SD))


def test_a_denoiser_without_units_comes_for_its_phase() -> None:
    small = Footprint(pipeline="P", components=(DENOISER.model_copy(update={"units": ()}),))
    assert placements(plan({"level": 3}, small)) == {"transformer": "per-phase"}


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
        because="cpu computes in host memory: there is nowhere to move to",
    )
    only_activations = plan({"offload_activations": True}, SD, separate=False)
    assert decisions(only_activations) == ["nothing is moved (activations)"]
    assert decisions(plan({"level": 1}, SD, separate=False)) == decisions(plan({"level": 1}, SD))


def test_where_nothing_can_move_the_rest_of_the_choices_stays() -> None:
    stored = {"placement": "per-unit", "storage": "float8_e4m3fn", "channels_last": True}
    decided = plan({"components": {"transformer": stored}}, separate=False)
    assert decided.components["transformer"] == ComponentPlan(storage="float8_e4m3fn", channels_last=True)


# a user's own choices


def test_a_choice_changes_its_field_and_no_other() -> None:
    level = plan({"level": 2})
    decided = plan({"level": 2, "vae": {"tile": 256}, "components": {"transformer": {"placement": "per-unit"}}})
    assert decided.vae == VaePlan(slicing=True, tile=256)
    assert placements(decided) == placements(level) | {"transformer": "per-unit"}
    assert decided.level == 2


def test_a_choice_can_take_back_what_the_level_decided() -> None:
    decided = plan({"level": 3, "vae": {"tile": None, "slicing": False}, "offload_activations": False,
                    "components": {name: {"placement": "resident"} for name in placements(plan({}))}})  # fmt: skip
    assert decided.model_copy(update={"level": 0}) == plan({"level": 0})


def test_a_choice_beside_the_placement_leaves_the_placement() -> None:
    decided = plan({"level": 3, "components": {"transformer": {"storage": "float8_e5m2", "compute_dtype": "bfloat16"}}})
    assert decided.components["transformer"] == ComponentPlan(
        placement="per-unit", storage="float8_e5m2", compute_dtype="bfloat16"
    )


def test_a_choice_has_its_reason_too() -> None:
    decided = plan({"components": {"vae": {"placement": "per-phase"}}, "vae": {"tile": 128}})
    assert decisions(decided) == ["tiles of 128 px", "vae per-phase"]


def test_choices_are_not_changed() -> None:
    choices: dict[str, Any] = {"level": 3, "vae": {"tile": 256}, "components": {"vae": {}}, "reasons": [1]}
    plan(choices)
    assert choices == {"level": 3, "vae": {"tile": 256}, "components": {"vae": {}}, "reasons": [1]}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_reasons_are_given_anew_and_never_taken(level: int) -> None:
    stale = [{"decision": "transformer on the moon", "because": "it is there"}]
    assert plan({"level": level, "reasons": stale}) == plan({"level": level})
    assert plan({"level": level, "reasons": "nonsense"}) == plan({"level": level})


# properties

PLACES = {"text_encoder": ["resident", "per-phase", "per-unit"], "unet": ["resident", "per-phase", "per-unit"],
          "vae": ["resident", "per-phase"]}  # fmt: skip
COMPONENT = {
    "channels_last": st.booleans(),
    "storage": st.sampled_from(["as-loaded", "float8_e4m3fn", "float8_e5m2"]),
}
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
                name: st.fixed_dictionaries({}, optional={"placement": st.sampled_from(places), **COMPONENT})
                for name, places in PLACES.items()
            },
        ),
        "budget": st.just({"device": "8GB"}),
    },
)


@settings(deadline=None)
@given(CHOICES, st.none() | st.builds(Request, height=st.integers(8, 2048)))
def test_a_plan_is_what_its_own_fields_plan(choices: dict[str, Any], request: Request | None) -> None:
    decided = plan(choices, SD, request=request)
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
            if separate or field != "placement":
                assert getattr(decided.components[name], field) == value
    for field, value in choices.get("vae", {}).items():
        assert getattr(decided.vae, field) == value


@settings(deadline=None)
@given(CHOICES)
def test_whatever_moves_has_its_reason(choices: dict[str, Any]) -> None:
    decided = plan(choices, SD)
    moved = {f"{name} {place}" for name, place in placements(decided).items() if place != "resident"}
    assert moved == {text for text in decisions(decided) if text.rpartition(" ")[2] in {"per-phase", "per-unit"}}


# what is refused


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"components": {"ve": {}}}, "unknown component of FluxPipeline 've': did you mean 'vae'?"),
        ({"components": {"q": {}}}, "unknown component of FluxPipeline 'q': there are text_encoder, transformer, vae"),
        ({"components": {"vae": {"placement": "per-unit"}}}, "vae has no layers to stream: per-phase would"),
        ({"level": 4}, "level must be less than or equal to 3, not 4"),
        ({"level": -1}, "level must be greater than or equal to 0, not -1"),
        ({"level": "low"}, "level must be a valid integer, not 'low'"),
        ({"levle": 1}, "unknown field of Plan 'levle': did you mean 'level'?"),
        ({"vae": {"tiel": 256}}, "unknown field of VaePlan 'tiel': did you mean 'tile'?"),
        ({"vae": {"overlap": 0.1}}, "vae.overlap=0.1 needs a tile size too, e.g. vae.tile=512"),
        ({"components": {"vae": {"placment": "resident"}}}, "unknown field of ComponentPlan 'placment'"),
        ({"components": {"vae": {"placement": "gone"}}}, "must be 'resident', 'per-phase' or 'per-unit', not 'gone'"),
        ({"components": {"vae": "resident"}}, "components.vae must be a valid dictionary or instance of ComponentPlan"),
        ({"components": None}, "components must be a valid dictionary, not None"),
        ({"vae": 512}, "vae must be a valid dictionary or instance of VaePlan, not 512"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(choices: dict[str, Any], message: str, separate: bool) -> None:
    with pytest.raises(PlanError) as error:
        plan(choices, separate=separate)
    assert message in str(error.value)


def test_an_overlap_needs_no_tile_of_its_own_where_the_level_has_one() -> None:
    assert plan({"level": 1, "vae": {"overlap": 0.1}}).vae == VaePlan(slicing=True, tile=LEVEL_TILE, overlap=0.1)


def test_an_unknown_component_is_named_in_the_facts() -> None:
    with pytest.raises(PlanError) as error:
        plan({"components": {"unett": {}}}, SD)
    assert error.value.facts == {"name": "unett"}


def test_a_request_inside_the_choices_is_checked_as_one() -> None:
    with pytest.raises(RequestError, match=r"unknown field of Request 'heigth': did you mean 'height'\?"):
        plan({"request": {"heigth": 512}})
