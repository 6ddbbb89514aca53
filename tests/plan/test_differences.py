"""What differs between two plans, in words."""

from __future__ import annotations

from tightfit.plan.explain import differences
from tightfit.schema.plan import ComponentPlan, Plan, VaePlan

MIB = 2**20
STREAMS = ComponentPlan(placement="stream", granularity="layer", resident_layers=("a",), ring_buffer=MIB)


def test_what_is_the_same_is_not_told() -> None:
    plan = Plan(components={"unet": STREAMS}, vae=VaePlan(strips=MIB))
    assert differences(plan, plan) == ()
    assert differences(plan, plan.model_copy(update={"reasons": (), "level": 1})) == ()


def test_every_decision_is_told() -> None:
    before = Plan(components={"unet": STREAMS, "vae": ComponentPlan()})
    after = Plan(
        device="cuda:1", components={"unet": ComponentPlan(), "vae": ComponentPlan()}, vae=VaePlan(tile=512),
        offload_activations=True, expandable_segments=True,
    )  # fmt: skip
    said = differences(before, after)
    assert said[0] == "on cuda:1 instead of cpu"
    assert said[1] == f"unet: resident (before: {STREAMS.described})"
    assert said[2] == "autoencoder: tiles of 512 px (before: whole images)"
    assert "wait in host memory" in said[3]
    assert len(said) == 5
    assert [len(differences(after, before)), "wait on the device" in differences(after, before)[3]] == [5, True]


def test_what_sounds_alike_is_told_apart() -> None:
    def of(part: ComponentPlan, vae: VaePlan | None = None) -> Plan:
        return Plan(components={"unet": part}, vae=vae or VaePlan(tile=64))

    others = STREAMS.model_copy(update={"resident_layers": ("b",)})
    assert differences(of(STREAMS), of(others)) == ("unet: as many resident layers, but others",)
    sized = STREAMS.model_copy(update={"weight_memory": 4 * MIB})
    assert differences(of(STREAMS), of(sized)) == ("unet: 4 MiB for weights (before: 0 B)",)
    stored = STREAMS.model_copy(update={"storage": "float8_e4m3fn"})
    assert differences(of(stored), of(stored.model_copy(update={"skip_patterns": ("x",)}))) == (
        "unet: another skip_patterns",
    )
    wider = VaePlan(tile=64, overlap=0.5)
    assert differences(of(STREAMS), of(STREAMS, wider)) == ("autoencoder: overlap 0.5",)
