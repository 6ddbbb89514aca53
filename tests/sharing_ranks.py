"""One rank of several that share one copy of offloaded weights in host memory: what a test starts several times.

As context_ranks; a trial prints what the rank's memory was, as the kernel counts it (bytes of anonymous and of shared
memory, of which each process has its part), in order: without the pipeline, with it, fitted, after calls, after undo.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from context_ranks import Trial, apart, main

SCALE = 16
FILE = "memfd:tightfit-weights"


def own_bytes() -> int:
    """Bytes of anonymous and shared memory of this process; those of n processes count as 1/n."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(size) * 1024 for size in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup, re.MULTILINE))


def open_files() -> int:
    """How many shared files this process has mapped or open."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(FILE in link for link in links) + Path("/proc/self/maps").read_text().count(FILE)


def tried(rank: int, trial: Trial) -> Trial:
    import torch
    import torch.distributed as dist

    import tightfit
    from tightfit.measure.modules import find_components
    from tiny_pipelines import CASES, run

    case = next(case for case in CASES if case.name == trial["name"])
    expected, memory = run(made(case, rank, trial), case), [settled_bytes()]
    pipe = made(case, rank, trial)
    before = {name: weight.detach() for name, weight in named_weights(find_components(pipe))}
    size = sum(weight.nbytes for weight in before.values())
    memory.append(settled_bytes())
    before = {name: weight.clone() for name, weight in before.items()} if trial.get("checks") else {}
    within = {name: trial[name] for name in ("level", "budget", "plan", "ram") if name in trial}
    device = registering() if trial.get("pinned") else "loopback"
    request = None if trial.get("later") else {"height": 64, "width": 64}
    mend = BREAKS[trial["broken"][1]]() if trial.get("broken", [None])[0] == rank else lambda: None
    fitted = tightfit.fit(pipe, **within, device=device, request=request, parallel="auto")
    mend()
    memory.append(settled_bytes())
    if "killed" in trial:
        killed(rank, trial, pipe)
    found, again = run(pipe, case), run(pipe, case)
    extra = THEN[trial["then"]](rank, pipe, case, fitted) if "then" in trial else {}
    memory.append(settled_bytes())
    report, shared = fitted.report(), shared_components(fitted)
    if trial.get("pinned"):
        extra["locked"] = device.locked  # type: ignore[union-attr]
    fitted.undo()
    memory.append(settled_bytes())
    if trial.get("pinned"):
        extra |= {"left": len(device.ranges), "died": device.died}  # type: ignore[union-attr]
    kept = dict(named_weights(find_components(pipe)))
    dist.barrier()
    return {
        "apart": apart(found, expected), "same": torch.equal(found, again), "memory": memory, "weights": size,
        "shared": shared, "files": open_files(), "notes": list(report.trace.notes), "plan": str(report.plan),
        "ordinary": all(type(weight) is torch.nn.Parameter and weight.nbytes for weight in kept.values()),
        "undone": all(torch.equal(kept[name], weight) for name, weight in before.items()), **extra,
    }  # fmt: skip


def made(case: Any, rank: int, trial: Trial) -> Any:
    """The pipeline; on one rank, with other values in a large weight, or in the last bias of the autoencoder."""
    pipe = case.make(trial.get("scale", SCALE))
    if trial.get("differs") == rank:
        large(pipe).data.add_(1e-3)
    if trial.get("differs_little") == rank:
        pipe.vae.decoder.conv_out.bias.data.add_(1e-6)
    return pipe


def large(pipe: Any) -> Any:
    """The first weight of the denoiser that is not small."""
    return next(weight for weight in pipe.unet.parameters() if weight.numel() > 2**18)


def named_weights(components: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{part}.{name}", weight) for part, its in components.items() for name, weight in its.named_parameters()]


def settled_bytes() -> int:
    """`own_bytes` at a time when no rank still has more."""
    import torch.distributed as dist

    from tightfit.devices.memory import trim_heap

    gc.collect()
    trim_heap()
    dist.barrier()
    size = own_bytes()
    dist.barrier()
    return size


def shared_components(fitted: Any) -> list[str]:
    """The components whose weight groups are all in shared memory."""
    from tightfit.apply.weights.shared_host_store import SharedHostStore

    placed = [manager.placed._groups for manager in fitted.session._places._all.values()]
    return sorted(
        name
        for groups in placed
        for name, its in groups.items()
        if all(isinstance(group.store, SharedHostStore) for group in its)
    )


def registering() -> Any:
    """A device whose driver page-locks memory: it knows addresses, and refuses ranges that overlap."""
    from apply.test_page_locking import Registering

    class Locking(Registering):
        def pinnable(self) -> int:
            return 2**40

    return Locking()


def total(weight: Any) -> float:
    return float(weight.detach().double().abs().sum())


# what is done to a fitted pipeline


def killed(rank: int, trial: Trial, pipe: Any) -> None:
    """One rank is killed; the others still have all weights."""
    if trial["killed"] == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    print(json.dumps({"sum": sum(map(total, pipe.unet.parameters())), "files": open_files()}), flush=True)
    os._exit(0)  # gloo would wait for the rank that is gone


def written(rank: int, pipe: Any, case: Any, fitted: Any) -> Trial:
    """Rank 0 writes to a weight in place, as a LoRA is fused; what each rank then has, before and after a call."""
    import torch.distributed as dist

    before = total(large(pipe))
    if rank == 0:
        large(pipe).data.mul_(2)
    dist.barrier()
    after = total(large(pipe))
    fitted_again(pipe, case)
    return {"factors": [after / before, total(large(pipe)) / before]}


def fitted_again(pipe: Any, case: Any) -> Any:
    from tiny_pipelines import run

    return run(pipe, case)


def fused(rank: int, pipe: Any, case: Any, fitted: Any) -> Trial:
    """An adapter is loaded after `fit` and then fused, on all ranks; beside one process that does the same."""
    import torch
    from peft import LoraConfig

    from tiny_pipelines import run

    single, found = case.make(SCALE), []
    plain = run(single, case)
    for each in (single, pipe):
        torch.manual_seed(3)
        each.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    for change in (lambda each: None, lambda each: each.unet.fuse_lora()):
        for each in (single, pipe):
            change(each)
        found.append(apart(run(pipe, case), run(single, case)))
    difference = apart(run(single, case), plain)
    pipe.unet.unfuse_lora()
    pipe.unet.delete_adapters("default")
    return {"fused": found, "difference": difference}


def copied(rank: int, pipe: Any, case: Any, fitted: Any) -> Trial:
    """A copy of the fitted network is ordinary, and what is written to it is in it alone."""
    import torch

    twin, same = copy.deepcopy(pipe.unet), case.make(SCALE)
    ordinary = all(type(weight) is torch.nn.Parameter for weight in twin.parameters())
    equal = all(map(torch.equal, twin.parameters(), same.unet.parameters()))
    for weight in twin.parameters():
        weight.data.zero_()
    return {"copied": ordinary and equal, "redrawn": apart(fitted_again(pipe, case), fitted_again(same, case))}


THEN: dict[str, Callable[..., Trial]] = {"written": written, "fused": fused, "copied": copied}


# what a rank lacks


def no_files() -> Callable[[], None]:
    """Let no file in memory be made, as a filter of system calls does; return an undo."""
    usual = os.memfd_create

    def refuse(*_: Any) -> int:
        raise OSError(38, "Function not implemented")

    os.memfd_create = refuse
    return lambda: setattr(os, "memfd_create", usual)


def little_memory() -> Callable[[], None]:
    """Let 1000 bytes of RAM be free; return an undo."""
    from tightfit.apply.context_parallel import weight_sharing

    usual, weight_sharing.ram_free = weight_sharing.ram_free, lambda: 1000
    return lambda: setattr(weight_sharing, "ram_free", usual)


BREAKS: dict[str, Callable[[], Callable[[], None]]] = {"no files": no_files, "little memory": little_memory}

if __name__ == "__main__":
    main(tried)
