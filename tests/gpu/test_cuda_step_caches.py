"""Step caches on a card: values decide there, what is kept waits in page-locked memory, weights stream beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tightfit import fit
from tightfit.devices.cuda_support import cuda_count
from tiny_pipelines import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

BY_NAME = {case.name: case for case in CASES}
STREAMED = {"placement": "stream", "weight_memory": "100KB"}


def draw(name: str, fields: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """The picture and the report of a second call."""
    case = BY_NAME[name]
    pipe = case.make()
    pipe.set_progress_bar_config(disable=True)
    denoiser = "unet" if name == "StableDiffusion" else "transformer"
    fitted = fit(pipe, plan={"device": "cuda:0", "components": {denoiser: fields}})
    for _ in range(2):
        arguments = case.call(64) | {"num_inference_steps": 6, "generator": torch.Generator().manual_seed(0)}
        pictures = pipe(**arguments)[0].float().cpu()
    report = fitted.report()
    fitted.undo()
    return pictures, report


@pytest.mark.parametrize("name", ["Flux", "StableDiffusion"])
@pytest.mark.parametrize(
    "cache",
    [{"strategy": "first-block", "threshold": 0.3}, {"strategy": "taylorseer", "interval": 2, "warm_up": 2},
     {"strategy": "pab"}, {"strategy": "faster-cache", "warm_up": 2}, {"strategy": "text-kv"},
     {"strategy": "sea-cache", "threshold": 0.6, "filters": "latents"},
     {"strategy": "easycache", "threshold": 0.3, "warm_up": 2}],
    ids=lambda cache: cache["strategy"],
)  # fmt: skip
def test_streamed_or_not_the_picture_is_the_same(name: str, cache: dict[str, Any]) -> None:
    wanted, resident = draw(name, {"cache": cache})
    found, streamed = draw(name, {"cache": cache} | STREAMED)
    assert torch.equal(found, wanted)
    assert streamed.trace.caches[0].skipped_steps == resident.trace.caches[0].skipped_steps
    if cache["strategy"] == "text-kv":
        assert torch.equal(found, draw(name, {})[0])
        return
    assert streamed.trace.caches[0].skipped_steps
    hosted, waiting = draw(name, {"cache": cache | {"keep_on": "host"}} | STREAMED)
    assert torch.equal(hosted, wanted)
    assert waiting.trace.caches[0].host_bytes > 0
