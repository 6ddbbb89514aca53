"""The four levels on the demo model, played on the loopback card: peaks, bytes moved, time beside the untouched."""

from __future__ import annotations

from typing import Any

import torch

from fp8 import demo_pipeline
from measuring import side_by_side, write
from tightfit import fit

CALL = {"prompt": "a large red circle on the left and a small blue square on the right", "num_inference_steps": 20}
ROUNDS = 9


def picture(pipe: Any) -> torch.Tensor:
    return pipe(**CALL, generator=torch.Generator().manual_seed(0), guidance_scale=2.5, output_type="pt").images


def main() -> None:
    plain = demo_pipeline()
    untouched = picture(plain)
    calls = {"untouched": lambda: picture(plain)}
    pipes = {}
    for level in range(4):
        for counted in (True, False):
            pipe = pipes[level, counted] = demo_pipeline()
            fit(pipe, level=level, device="loopback", count_activations=counted)
            calls[f"level {level}{'' if counted else ', not counted'}"] = lambda pipe=pipe: picture(pipe)
    times = side_by_side(calls, ROUNDS)
    facts: dict[str, Any] = {"untouched": {"seconds": round(times["untouched"], 3)}}
    for level in range(4):
        pipe = pipes[level, True]
        handle = fit(pipe, level=level, device="loopback")
        same = torch.equal(picture(pipe), untouched) and torch.equal(picture(pipes[level, False]), untouched)
        trace = handle.report().trace
        facts[f"level {level}"] = {
            "peak_bytes": trace.peak_bytes,
            "peak_weight_bytes": max(phase.peak_weights for phase in trace.phases),
            "bytes_in": sum(phase.bytes_in for phase in trace.phases),
            "time_ratio": round(times[f"level {level}, not counted"] / times["untouched"], 3),
            "time_ratio_counted": round(times[f"level {level}"] / times["untouched"], 3),
            "same_bits": same,
        }
    write("levels", facts)


if __name__ == "__main__":
    main()
