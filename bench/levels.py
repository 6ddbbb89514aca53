"""The four levels on the demo model, played on the loopback card: peaks, bytes moved, time beside the untouched."""

from __future__ import annotations

from typing import Any

import torch

from fp8 import demo_pipeline
from measuring import side_by_side, write
from tightfit import fit

CALL = {"prompt": "a large red circle on the left and a small blue square on the right", "num_inference_steps": 20}
ROUNDS = 3


def picture(pipe: Any) -> torch.Tensor:
    return pipe(**CALL, generator=torch.Generator().manual_seed(0), guidance_scale=2.5, output_type="pt").images


def main() -> None:
    plain = demo_pipeline()
    untouched = picture(plain)
    fitted_pipes = {level: demo_pipeline() for level in range(4)}
    handles = {level: fit(pipe, level=level, device="loopback") for level, pipe in fitted_pipes.items()}
    calls = {"untouched": lambda: picture(plain)}
    calls |= {f"level {level}": lambda pipe=pipe: picture(pipe) for level, pipe in fitted_pipes.items()}
    times = side_by_side(calls, ROUNDS)
    facts: dict[str, Any] = {"untouched": {"seconds": round(times["untouched"], 3)}}
    for level, pipe in fitted_pipes.items():
        same = torch.equal(picture(pipe), untouched)
        trace = handles[level].report().trace
        facts[f"level {level}"] = {
            "peak_bytes": trace.peak_bytes,
            "peak_weight_bytes": max(phase.peak_weights for phase in trace.phases),
            "bytes_in": sum(phase.bytes_in for phase in trace.phases),
            "time_ratio": round(times[f"level {level}"] / times["untouched"], 3),
            "same_bits": same,
        }
    write("levels", facts)


if __name__ == "__main__":
    main()
