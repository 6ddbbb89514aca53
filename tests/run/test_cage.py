"""A whole text-to-image pipeline that is larger than the memory it is given, from loading to the picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import psutil
import pytest
import torch
import transformers
import yaml
from PIL import Image

from tiny_pipelines import CASES

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 1_500_000_000
PROMPT = "a red circle"
WIDTH = 1024  # of what the text encoder says


def large_pipeline() -> Any:
    """FLUX.1's shape, 4 GB of random float32 weights: 1.4 of text encoder, 2.2 of denoiser, 0.3 of autoencoder."""
    torch.manual_seed(0)
    pipe = next(case for case in CASES if case.name == "Flux").make()
    text = pipe.text_encoder_2.config.to_dict() | {"d_model": WIDTH, "d_kv": 64, "d_ff": 8192, "num_heads": 16}
    pipe.text_encoder_2 = transformers.T5EncoderModel(transformers.T5Config(**text | {"num_layers": 12})).eval()
    pipe.transformer = diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=11, attention_head_dim=128, num_attention_heads=12,
        joint_attention_dim=WIDTH, pooled_projection_dim=pipe.text_encoder.config.hidden_size,
        guidance_embeds=True, axes_dims_rope=(16, 56, 56),
    ).eval()  # fmt: skip
    pipe.vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=16, scaling_factor=0.36,
        shift_factor=0.12, use_quant_conv=False, use_post_quant_conv=False,
    ).eval()  # fmt: skip
    return type(pipe)(**pipe.components)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "model"
    large_pipeline().save_pretrained(folder, max_shard_size="500MB")
    return folder


@pytest.fixture
def cage() -> Iterator[Path]:
    """A control group that kills what exceeds LIMIT."""
    if os.geteuid() != 0 or not (GROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and control groups of version 1")
    group = GROUPS / f"tightfit-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    (group / "memory.swappiness").write_text("0")
    yield group
    group.rmdir()


def tightfit(arguments: list[str], group: Path | None = None) -> tuple[int, str, int]:
    """Exit code, output, and the most memory of `tightfit ARGUMENTS`, as two threads, in a control group."""
    return python(["-m", "tightfit", *arguments], group)


def python(arguments: list[str], group: Path | None = None) -> tuple[int, str, int]:
    Path("/proc/sys/vm/drop_caches").write_text("1\n") if group else None
    enter = f"echo $$ > {group}/cgroup.procs; " if group else ""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    with subprocess.Popen(
        ["/bin/sh", "-c", f'{enter}exec "$0" "$@"', sys.executable, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    ) as process:  # fmt: skip
        most = 0
        while process.poll() is None:
            try:
                memory = psutil.Process(process.pid).memory_info()
                most = max(most, memory.rss - memory.shared)  # pages of files do not count
                process.wait(0.05)
            except (psutil.Error, subprocess.TimeoutExpired):
                continue
        assert process.stdout is not None
        return process.returncode, process.stdout.read(), most


@pytest.mark.slow
def test_four_gigabytes_of_weights_in_one_and_a_half(large_model: Path, cage: Path, tmp_path: Path) -> None:
    size = sum(file.stat().st_size for file in large_model.rglob("*.safetensors"))
    assert size > 3.9e9
    request = ["--height", "256", "--width", "256", "--steps", "2", "--seed", "3"]
    code, said, _ = tightfit(
        ["run", str(large_model), PROMPT, *request, "--level", "0", "--out", str(tmp_path / "a.png")]
    )
    assert code == 0, said
    chosen = {"placement": "stream", "offload_to": "disk"}
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "transformer", "vae"), chosen)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"components": parts}))
    place = ["--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "b.png"), "--json"]
    code, said, most = tightfit(["run", str(large_model), PROMPT, *request, *place], cage)
    assert code == 0, said
    assert "oom_kill 0" in (cage / "memory.oom_control").read_text()
    assert most < LIMIT
    told = json.loads(said.splitlines()[-1])
    assert told["lossless"] is True
    pictures = [np.array(Image.open(tmp_path / name)) for name in ("a.png", "b.png")]
    assert pictures[0].std() > 1
    assert (pictures[0] == pictures[1]).all()
    print(f"{size / 1e9:.2f} GB of weights, {most / 1e6:.0f} MB resident at most, {told['measured']['seconds']:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("store", ["disk", "cpu"])
def test_what_is_larger_than_memory_is_loaded_into_eight_bits(
    store: str, large_model: Path, cage: Path, tmp_path: Path
) -> None:
    """Four gigabytes in float32 are one in eight bits: no more than one weight is there as the files hold it."""
    chosen = {"placement": "stream", "offload_to": "disk", "storage": "float8_e4m3fn", "skip_patterns": []}
    parts: dict[str, Any] = {
        "text_encoder_2": chosen | {"offload_to": store}, "transformer": chosen,
        "vae": {"placement": "stream", "offload_to": "disk"},
    }  # fmt: skip
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"components": parts}))
    request = ["--height", "256", "--width", "256", "--steps", "2", "--seed", "3"]
    place = ["--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "c.png"), "--json"]
    code, said, most = tightfit(["run", str(large_model), PROMPT, *request, *place], cage)
    assert code == 0, said
    assert "oom_kill 0" in (cage / "memory.oom_control").read_text()
    assert most < LIMIT
    assert json.loads(said.splitlines()[-1])["lossless"] is False
    assert np.array(Image.open(tmp_path / "c.png")).std() > 1
    print(f"{store}: {most / 1e6:.0f} MB resident at most")


@pytest.mark.slow
def test_a_ram_budget_is_all_that_need_be_said(large_model: Path, cage: Path, tmp_path: Path) -> None:
    """The plan is made inside the cage too; whether its footprint was known by then makes no difference."""
    request = ["--height", "256", "--width", "256", "--steps", "2", "--seed", "3"]
    code, said, _ = tightfit(
        ["run", str(large_model), PROMPT, *request, "--level", "0", "--out", str(tmp_path / "a.png")]
    )
    assert code == 0, said
    for name in ("b.png", "c.png"):
        place = ["--ram", "1.3GB", "--device", "cpu", "--out", str(tmp_path / name), "--json"]
        code, said, most = tightfit(["run", str(large_model), PROMPT, *request, *place], cage)
        assert code == 0, said
        assert "oom_kill 0" in (cage / "memory.oom_control").read_text()
        assert most <= 1_300_000_000
        told = json.loads(said.splitlines()[-1])
        assert told["lossless"] is True
        assert max(phase["measured_peak_bytes"] for phase in told["phases"]) <= told["predicted"]["peak_bytes"]
        print(f"{most / 1e6:.0f} MB resident at most, {told['measured']['seconds']:.1f} s")
    pictures = [np.array(Image.open(tmp_path / name)) for name in ("a.png", "b.png", "c.png")]
    assert all((picture == pictures[0]).all() for picture in pictures)
    code, said, _ = tightfit(["run", str(large_model), PROMPT, *request, "--ram", "600MB", "--device", "cpu"], cage)
    assert code == 3, said
    assert "before anything is loaded, on this CPU" in said


LARGER = """
import sys, json, torch, tightfit
loaded = tightfit.load(sys.argv[1], ram="1.3GB", device="cpu", request={"height": 256, "width": 256, "steps": 2})
for side, file in zip((256, 512, 256), sys.argv[2:]):
    asked = {"height": side, "width": side, "num_inference_steps": 2, "generator": torch.Generator().manual_seed(3)}
    loaded.pipe("a red circle", **asked).images[0].save(file)
    trace, plan = loaded.fitted.report().trace, loaded.fitted.plan
    print(json.dumps({"notes": trace.notes, "rss": trace.rss_peak_bytes, "height": plan.request.height}))
"""


@pytest.mark.slow
def test_a_larger_call_is_planned_for_in_there(large_model: Path, cage: Path, tmp_path: Path) -> None:
    """From plan to plan, four gigabytes on the disk are not read into 1.3 of memory."""
    files = [str(tmp_path / f"{name}.png") for name in "abc"]
    code, said, most = python(["-c", LARGER, str(large_model), *files], cage)
    assert code == 0, said
    assert "oom_kill 0" in (cage / "memory.oom_control").read_text()
    assert most <= 1_300_000_000
    told = [json.loads(line) for line in said.splitlines() if line.startswith('{"notes"')]
    assert [each["height"] for each in told] == [256, 512, 256]
    assert all("planned anew for" in str(each["notes"]) for each in told[1:])
    pictures = [np.array(Image.open(file)) for file in files]
    assert (pictures[0] == pictures[2]).all()
    for side, picture, rounding in ((256, pictures[0], 0), (512, pictures[1], 1)):  # strips add up in another order
        request = ["--height", str(side), "--width", str(side), "--steps", "2", "--seed", "3"]
        whole = str(tmp_path / f"{side}.png")
        code, said, _ = tightfit(["run", str(large_model), PROMPT, *request, "--level", "0", "--out", whole])
        assert code == 0, said
        assert np.abs(np.array(Image.open(whole)).astype(int) - picture).max() <= rounding
    print(f"{most / 1e6:.0f} MB resident at most; " + "; ".join(f"{each['rss'] / 1e6:.0f} MB" for each in told))
