"""One rank of several that run tiny pipelines with guidance in two groups: what a test starts several times.

As context_ranks; a trial prints, of three calls (the same twice, and one for a taller picture), the largest error
against one process, relative to the largest value; a digest of each picture; and the notes of each report.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from context_ranks import NAMES, Trial, apart, counts, device_of, main

HEIGHTS = (64, 64, 96)


def tried(rank: int, trial: Trial) -> Trial:
    import torch.distributed as dist

    import tightfit
    from more_pipelines import MORE_CASES
    from tiny_pipelines import CASES, run

    case = next(case for case in (*CASES, *MORE_CASES) if case.name == trial["name"])
    single, pipe = (case.make(trial.get("scale", 1)) for _ in range(2))
    if "counts" in trial:
        for each in (single, pipe):
            COUNTERS[trial["counts"]](denoiser_of(each))
        before = run(case.make(), case)
    else:
        before = run(pipe, case)
    within = {name: trial[name] for name in ("level", "budget", "plan") if name in trial}
    groups: Trial = {"context": dist.get_world_size() // 2, "cfg": 2, "attention": trial.get("attention", "auto")}
    parallel = trial.get("parallel", groups)
    if "rates" in trial:
        with_rates(trial["rates"] if isinstance(trial["rates"], dict) else trial["rates"][rank])
    usual = case.call()
    request = {ours: usual[name] for ours, name in NAMES.items() if name in usual}
    fitted = tightfit.fit(pipe, **within, device=device_of(rank, trial), request=request, parallel=parallel)
    if "reads" in trial:
        called(single, READERS[trial["reads"]])
    if "reads" in trial and trial.get("reader", rank) == rank:
        called(pipe, READERS[trial["reads"]])
    calls = [case.call(height) | trial.get("call", {}) for height in HEIGHTS[: trial.get("calls")]]
    if "unguided" in trial:
        calls[-1] |= {"guidance_scale": 1.0, "num_images_per_prompt": 1}
    found, said, layouts = [], [], []
    for asked in calls:
        failing = {"callback_on_step_end": fail} if trial.get("fails") == rank else {}
        try:
            found.append(pipe(**anew(asked), **failing)[0].float().cpu())
        except Exception as error:
            ended = {"error": f"{type(error).__name__}: {error}"}
            return ended if "reads" in trial else ended | {"apart": apart(run(pipe, case), before)}
        said.append(list(fitted.report().trace.notes))
        layouts.append([fitted.plan.context, fitted.plan.cfg_groups])
    expected = [single(**anew(asked))[0].float() for asked in calls]
    report = fitted.report()
    fitted.undo()
    return {
        "apart": max(map(apart, found, expected)),
        "pictures": [hashlib.sha256(picture.numpy().tobytes()).hexdigest() for picture in found],
        "notes": said,
        "layouts": layouts,
        "counts": counts(),
        "undone": "counts" in trial or bool((run(pipe, case) == before).all()),
        "plan": str(report.plan),
        "predicted": report.plan.predicted_peak(report.plan.device),
        "peak": max(phase.peak_bytes for phase in report.trace.phases),
        "runs": sum(phase.runs for phase in report.trace.phases if phase.name == "denoise"),
    }


def with_rates(rates: dict[str, Any]) -> None:
    """Let plans be made with these rates of the device."""
    from tightfit.run.rank_replanning import RankReplanner

    usual = RankReplanner._free_machine

    def machine(self: Any) -> Any:
        found = usual(self)
        (own,) = found.accelerators
        return found.model_copy(update={"accelerators": (own.model_copy(update=rates),)})

    RankReplanner._free_machine = machine  # type: ignore[method-assign]


def anew(call: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with a generator that is not used up."""
    return call | {"generator": call["generator"].clone_state()}


def fail(*_: Any) -> Any:
    raise ArithmeticError("of the user's own")


def called(pipe: Any, read: Callable[[Any], None]) -> None:
    """Have `read` see each output of the denoiser as soon as the pipeline has it."""
    denoiser = denoiser_of(pipe)
    kind = type(denoiser)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)
        read(output[0])
        return output

    denoiser.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def denoiser_of(pipe: Any) -> Any:
    return getattr(pipe, "transformer", None) or pipe.unet


def count_in_hook(denoiser: Any) -> None:
    """Scale every second output, counted by a hook."""
    seen: list[None] = []

    def hook(*given: Any) -> Any:
        seen.append(None)
        output = given[-1]
        return (output[0] * (1 + 0.5 * (len(seen) % 2)), *output[1:])

    denoiser.register_forward_hook(hook)


def count_in_forward(denoiser: Any) -> None:
    """Scale every second output, counted in the network, as caches over steps count them."""
    kind = type(denoiser)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.counted += 1
        output = kind.forward(self, *args, **kwargs)
        return (output[0] * (1 + 0.5 * (self.counted % 2)), *output[1:])

    denoiser.counted = 0
    denoiser.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def write(output: Any) -> None:
    output.mul_(0.5)
    output[..., ::2].add_(output.flatten()[0])


READERS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda output: output.double().sum().item(),
    "numpy": lambda output: output.numpy().copy(),
    "view": lambda output: output[:, :1].float().tolist(),
    "write": write,
}

COUNTERS = {"hook": count_in_hook, "forward": count_in_forward}

if __name__ == "__main__":
    main(tried)
