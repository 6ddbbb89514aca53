"""`save_pretrained` of fitted pipelines: the weights that were loaded, in shards, wherever they are meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from anonymous_memory import anonymous_bytes, highest_anonymous
from shard_checks import assert_same, weights
from tightfit import fit
from tightfit.measure.modules import find_components
from tiny_pipelines import CASES, run

CASE = {case.name: case for case in CASES}


def on_disk(pipe: Any) -> dict[str, Any]:
    plan = {name: {"placement": "stream", "offload_to": "disk"} for name in find_components(pipe)}
    return {"plan": {"components": plan}, "device": "loopback"}


WAYS: dict[str, Any] = {f"level {level}": {"level": level, "device": "loopback"} for level in range(4)}
WAYS |= {"level 3 on the CPU": {"level": 3, "device": "cpu"}, "budget": {"budget": "300MB", "device": "loopback"}}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("called", [True, False], ids=["called", "new"])
@pytest.mark.parametrize("way", [*WAYS, "disk"])
def test_shards_of_a_fitted_pipeline(way: str, called: bool, tmp_path: Path) -> None:
    pipe: Any = CASE["StableDiffusion3"].make()
    expected = {name: value.clone() for name, value in weights(pipe).items()}
    fitted = fit(pipe, **(WAYS[way] if way in WAYS else on_disk(pipe)))
    if called:
        run(pipe, CASE["StableDiffusion3"])
    pipe.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    again = run(pipe, CASE["StableDiffusion3"])  # saving left everything as it was
    fitted.undo()
    read = type(pipe).from_pretrained(tmp_path / "saved")
    assert_same(weights(read), expected)
    assert_same(weights(pipe), expected)
    assert torch.equal(run(pipe, CASE["StableDiffusion3"]), again)
    shards = list((tmp_path / "saved/transformer").glob("*-of-*.safetensors"))
    assert len(shards) > 3
    for shard in shards:
        held = load_file(shard)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= 20_000


def test_names_and_shards_are_those_of_the_pipeline_as_it_was(tmp_path: Path) -> None:
    """Also tied weights of T5, once."""
    pipe: Any = CASE["Flux"].make()
    pipe.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    fit(pipe, **on_disk(pipe))
    pipe.save_pretrained(tmp_path / "fitted", max_shard_size="20KB")
    plain, fitted = (
        {str(path.relative_to(tmp_path / which)): path for path in (tmp_path / which).rglob("*") if path.is_file()}
        for which in ("plain", "fitted")
    )
    assert plain.keys() == fitted.keys()
    for name, path in plain.items():
        if path.suffix == ".safetensors":
            assert_same(load_file(fitted[name]), load_file(path))
        elif "index" in name:
            assert fitted[name].read_text() == path.read_text()


def test_changed_weights_are_saved_as_they_are(tmp_path: Path) -> None:
    pipe: Any = CASE["StableDiffusion"].make()
    fit(pipe, **on_disk(pipe))
    with torch.no_grad():
        pipe.unet.conv_in.weight.mul_(2)
        pipe.unet.mid_block.resnets[0].conv1.weight.add_(1)
    changed = {name: value.clone() for name, value in pipe.unet.state_dict().items()}
    pipe.unet.save_pretrained(tmp_path, max_shard_size="100KB")
    assert_same(diffusers.UNet2DConditionModel.from_pretrained(tmp_path).state_dict(), changed)


@pytest.mark.parametrize("place", [{"placement": "resident"}, {"placement": "offload"}, {"placement": "stream"},
                                   {"placement": "stream", "offload_to": "disk"}], ids=str)  # fmt: skip
def test_weights_in_eight_bits_are_saved_as_they_compute(place: dict[str, str], tmp_path: Path) -> None:
    pipe: Any = CASE["StableDiffusion"].make()
    plain = {name: value.clone() for name, value in pipe.unet.state_dict().items()}
    fit(pipe, plan={"components": {"unet": {**place, "storage": "float8_e4m3fn"}}}, device="loopback")
    expected = run(pipe, CASE["StableDiffusion"])
    pipe.unet.save_pretrained(tmp_path, max_shard_size="100KB")
    saved = diffusers.UNet2DConditionModel.from_pretrained(tmp_path)
    assert any(not torch.equal(value, plain[name]) for name, value in saved.state_dict().items())
    other: Any = CASE["StableDiffusion"].make()
    other.unet = saved.eval()
    assert torch.allclose(run(other, CASE["StableDiffusion"]), expected, atol=1e-5)


def test_memory_is_that_of_one_shard(tmp_path: Path) -> None:
    network = diffusers.FluxTransformer2DModel(
        num_layers=8, num_single_layers=1, attention_head_dim=128, num_attention_heads=4, joint_attention_dim=64,
        in_channels=16, pooled_projection_dim=64, axes_dims_rope=(32, 48, 48),
    )  # fmt: skip
    size = sum(value.nbytes for value in network.parameters())
    assert size > 2**27
    fit(network, plan={"components": {"model": {"placement": "stream", "offload_to": "disk"}}}, device="loopback")
    before = anonymous_bytes(os.getpid())
    with highest_anonymous() as seen:
        network.save_pretrained(tmp_path, max_shard_size="10MB")
    assert seen.most - before < size / 2, (seen.most - before, size)
    assert len(list(tmp_path.glob("*.safetensors"))) > 10
