"""Each decision of a plan has one reason, as a sentence; components with the same one share it."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.plan.presets import plan_for
from tightfit.schema.footprint import Component, Footprint, WeightBlock
from tightfit.schema.machine import Accelerator

MIB = 2**20
ENCODER = Component(
    name="text_encoder",
    class_name="E",
    role="encoder",
    bytes=90 * MIB,
    dtypes={"bfloat16": 90 * MIB},
    head_widths=(64,),
)
UNET = Component(
    name="unet",
    class_name="U",
    role="denoiser",
    bytes=200 * MIB,
    dtypes={"bfloat16": 200 * MIB},
    has_skip_connections=True,
    layers=(WeightBlock(name="a", bytes=50 * MIB), WeightBlock(name="b", bytes=150 * MIB)),
    convolves=True,
    head_widths=(40, 80),
)
VAE = Component(
    name="vae",
    class_name="V",
    role="autoencoder",
    bytes=10 * MIB,
    dtypes={"bfloat16": 10 * MIB},
    convolves=True,
    head_widths=(512,),
)
PIPELINE = Footprint(pipeline="P", components=(ENCODER, UNET, VAE))
CARD = Accelerator(name="cuda:0", kind="cuda", bytes=2**34, product_name="RTX 4090", compute_capability="8.9")
CPU = Accelerator(name="cpu", kind="cpu", bytes=2**34, product_name="Xeon")


def said(choices: dict[str, Any], accelerator: Accelerator | None = None, *, separate: bool = True) -> dict[str, str]:
    """Reasons by decision."""
    plan = plan_for(PIPELINE, "cuda:0", separate=separate, choices=choices, accelerator=accelerator)
    told = {reason.decision: reason.because for reason in plan.reasons}
    assert len(told) == len(plan.reasons)
    return told


def of(component: str, **fields: Any) -> dict[str, Any]:
    return {"components": {component: fields}}


ITEMS = "unet: at most 2 items at a time"


@pytest.mark.parametrize(
    ("choices", "decision", "because"),
    [
        ({"vae": {"slicing": True}}, "one item at a time", "decoding a batch together multiplies the peak"),
        ({"vae": {"tile": 256}}, "tiles of 256 px", "maps at full resolution are the peak of a large image"),
        ({"vae": {"strips": MIB}}, "strips within 1 MiB", "the peak of a large image; strips give the same result"),
        ({"vae": {"strips": MIB, "tile": 256}}, "tiles of 256 px where strips are not possible", "less than an image"),
        ({"vae": {"strips": MIB}}, "feature maps between strips on the device", "nothing is copied"),
        (
            {"vae": {"strips": MIB, "feature_maps": "host"}},
            "feature maps between strips in host memory",
            "crosses the link twice",
        ),
        (
            {"vae": {"strips": MIB, "feature_maps": "recompute"}},
            "feature maps between strips as far as they fit",
            "recomputed",
        ),
        (of("unet", storage="int8"), "unet stored in int8", "most weights take one byte instead of 2"),
        (of("unet", max_batch=2), ITEMS, "a larger batch makes no more activations at once"),
        (of("unet", max_batch=1), "unet: at most 1 item at a time", "a larger batch makes no more activations at once"),
        (
            of("unet", max_batch=2, placement="stream"),
            ITEMS,
            "at once; block by block, so that weights are loaded once",
        ),
        (of("unet", cfg="sequential"), "unet: guidance in two calls a step", "half of the activations"),
        (of("unet", cfg="batched"), "unet: guidance in one call a step", "loaded and read once for both"),
        (of("unet", ffn_chunk=MIB), "unet: feed-forwards within 1 MiB", "several times as wide"),
        (of("unet", exported="{}.trace"), "unet as exported in {}.trace", "its graph runs in place of the"),
        (
            of("unet", exported="u", compiled=True),
            "unet as exported in u, compiled",
            "its machine code runs in place",
        ),
        (of("vae", placement="offload"), "vae offloaded", "its 10 MiB are only needed while it runs"),
        (of("unet", placement="stream"), "unet streamed", "one layer at a time needs 150 MiB of its 200 MiB"),
        (
            {"offload_activations": True},
            "skip connections of unet offloaded to host memory",
            "the second half of a step needs them",
        ),
        (
            {"offload_activations": True} | of("unet", exported="u"),
            "no activations are offloaded",
            "no block keeps any",
        ),
    ],
)
def test_a_decision_has_its_reason(choices: dict[str, Any], decision: str, because: str) -> None:
    assert because in said(choices)[decision]


def test_components_share_a_reason() -> None:
    each = {name: {"storage": "int8", "placement": "offload"} for name in ("text_encoder", "vae")}
    assert list(said({"components": each})) == ["text_encoder, vae stored in int8", "text_encoder, vae offloaded"]


def test_where_nothing_can_move_maps_stay() -> None:
    told = said({"vae": {"strips": MIB, "feature_maps": "host"}}, separate=False)
    assert list(told) == [
        "strips within 1 MiB",
        "feature maps between strips on the device",
        "nothing is moved (activations)",
    ]


# layouts


@pytest.mark.parametrize(
    ("gains", "wanted", "decision", "because"),
    [
        ({"denoiser.bfloat16": 1.184}, True, "unet channels-last",
         "convolutions ran 1.18 × as fast in it on this computer"),
        ({"denoiser.bfloat16": 1.184}, "auto", "unet channels-last",
         "convolutions ran 1.18 × as fast in it on this computer"),
        ({"denoiser.bfloat16": 0.8}, True, "unet channels-last",
         "requested; but convolutions ran only 0.80 × as fast in it on this computer"),
        ({"denoiser.bfloat16": 0.8}, "auto", "unet not channels-last",
         "convolutions ran only 0.80 × as fast in it on this computer"),
        ({"denoiser.float32": 2.0}, "auto", "unet not channels-last",
         "whether that is faster was not measured in bfloat16 on the RTX 4090"),
        ({}, "auto", "unet not channels-last",
         "whether that is faster was not measured on the RTX 4090 (`tightfit machine` there would)"),
        ({}, True, "unet channels-last",
         "requested; whether that is faster was not measured on the RTX 4090 (`tightfit machine` there would)"),
    ],
)  # fmt: skip
def test_a_layout_says_what_was_measured(gains: dict[str, float], wanted: Any, decision: str, because: str) -> None:
    here = CARD.model_copy(update={"channels_last_gains": gains})
    assert said(of("unet", channels_last=wanted), here)[decision] == because
    assert decision not in said(of("unet", channels_last=False), here)


def test_a_layout_of_what_does_not_convolve() -> None:
    told = said({"components": {"text_encoder": {"channels_last": True}}})
    assert told == {"text_encoder channels-last": "requested; but it has no convolutions over pictures"}


# attention


def attention(choices: dict[str, Any], accelerator: Accelerator | None) -> dict[str, str]:
    return {what: why for what, why in said(choices, accelerator).items() if what.startswith("attention")}


def test_who_computes_attention_on_a_card() -> None:
    assert attention({}, CARD) == {
        "attention of unet by torch's flash attention":
            "it takes heads of 40, 80 in bfloat16 without a mask on the RTX 4090",
        "attention of vae by torch's memory-efficient attention":
            "it takes heads of 512 in bfloat16 on the RTX 4090; flash does not take heads of 512, more than 256",
    }  # fmt: skip


def test_who_computes_attention_on_a_cpu() -> None:
    assert attention({}, CPU) == {
        "attention of unet by torch's fused kernel": "it takes heads of 40, 80 in bfloat16 on this CPU",
        "attention of vae by torch's fused kernel": "it takes heads of 512 in bfloat16 on this CPU",
    }


def test_attention_in_chunks_where_a_card_has_no_kernel() -> None:
    old = CARD.model_copy(update={"product_name": "Tesla T4", "compute_capability": "7.5"})
    assert attention({}, old) == {
        "attention of unet, vae in chunks":
            "no fused kernel of torch's takes bfloat16 on the Tesla T4; 64 MiB of scores at a time",
    }  # fmt: skip


def test_nothing_is_said_of_attention_that_nobody_knows_or_that_has_been_chosen() -> None:
    assert attention({}, None) == {}
    assert attention({}, CARD.model_copy(update={"kind": "tpu"})) == {}
    assert "unet" not in " ".join(attention(of("unet", exported="u"), CARD))
    compiled = PIPELINE.model_copy(update={"components": (UNET.model_copy(update={"compiled": True}),)})
    assert plan_for(compiled, "cuda:0", separate=True, choices={}, accelerator=CARD).reasons == ()


@pytest.mark.parametrize(
    ("name", "decision", "because"),
    [
        ("torch", "attention of vae as torch chooses", "requested, also where that makes all scores at once"),
        ("efficient", "attention of vae by torch's memory-efficient attention", "requested"),
        ("math", "attention of vae by torch's path of plain products",
         "requested: all scores are made at once"),
        ("chunked", "attention of vae by chunked attention", "requested"),
        ("xformers", "attention of vae by xFormers' attention", "requested, where it is installed"),
        ("flash", "attention of vae by torch's flash attention",
         "requested; what it does not take is done as with auto: heads of 512, more than 256"),
    ],
)  # fmt: skip
def test_attention_by_name(name: str, decision: str, because: str) -> None:
    assert attention(of("vae", attention=name), CARD)[decision] == because
