"""Two processes of one core each that share a call's rows, beside one process of one core: time and activations.

    python bench/ranks_cpu.py [--rounds 3] [--cases unet,transformer,decode]

Each round, one process makes the call alone (the other waits), both make it together over gloo, and both compute the
larger rank's share at the same time without sending anything: that is the ceiling of what sharing could reach on this
computer. Writes bench/results/ranks-cpu.json, and keeps its rows of other cases. Wants an idle computer with two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import nn

from measuring import RESULTS, counting, fill_at_random, write
from tightfit.apply.context_parallel.doubled_inputs import ComponentArguments, DoubledInputs
from tightfit.apply.context_parallel.parallel_method import ParallelMethod, RowSharing
from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.apply.context_parallel.row_shares import RowShares
from tightfit.catalog.known import known_model
from tightfit.devices.device import CpuDevice
from tightfit.measure.build_models import build_network
from tightfit.measure.recorder import Recorder

CASES = {  # method, and the arguments at a height of latents
    "unet": ("sd-1.5", "unet", {}, "forward"),
    "transformer": ("wan-2.1-1.3b", "transformer", {"num_layers": 4}, "forward"),
    "decode": ("sd-1.5", "vae", {}, "decode"),
}


class LoneRankGroup(RankGroup):
    """Rank 0 of two, which sends nothing and receives whatever is in new memory: it computes its share alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self._calling = 0, True

    def check_same(self, name: str, tensors: Sequence[torch.Tensor], did: str = "") -> None:
        pass

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self.size

    def _started(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> Callable[[], None]:
        for _, tensor in received:
            tensor.zero_()
        return lambda: None


def arguments_of(case: str, rows: int) -> dict[str, Any]:
    """The arguments of a call, float32, for latents with so many rows."""
    if case == "unet":
        return {
            "sample": torch.randn(2, 4, rows, 64), "timestep": torch.tensor(500),
            "encoder_hidden_states": torch.randn(2, 77, 768), "return_dict": False,
        }  # fmt: skip
    if case == "transformer":  # 8 × 32 × 32 = 8192 tokens
        return {
            "hidden_states": torch.randn(1, 16, 8, rows, 64), "timestep": torch.tensor([500]),
            "encoder_hidden_states": torch.randn(1, 512, 4096), "return_dict": False,
        }  # fmt: skip
    return {"z": torch.randn(1, 4, rows, 128), "return_dict": False}


def network_of(case: str) -> nn.Module:
    model, component, changes, _ = CASES[case]
    part = known_model(model).components[component]
    kind = getattr(diffusers, part.class_name)
    network = build_network(lambda: kind.from_config({**part.config, **changes}), torch.float32).eval()
    fill_at_random(network)
    return network


def method_on(case: str, network: nn.Module, group: RankGroup) -> Callable[..., Any]:
    """The method of `case`, run by the ranks of `group`."""
    method, recorder = CASES[case][3], Recorder(CpuDevice(), count_activations=False)
    doubled: DoubledInputs | str = ""
    if method == "forward":
        one, other = (ComponentArguments((), arguments_of(case, rows)) for rows in (64, 128))
        doubled = DoubledInputs.of(one, other)
    sharing = RowSharing(group, RowShares.equal(2), "gathered")
    kind = type(network)
    plain = getattr(kind, method)
    return ParallelMethod(kind, case, method, sharing, recorder, doubled).wrapped(getattr(plain, "__wrapped__", plain))


def called(method: Callable[..., Any], network: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    latents = [given["z"]] if "z" in given else []  # an autoencoder's have to be the first argument
    with torch.no_grad():
        found: Any = method(network, *latents, **{name: value for name, value in given.items() if name != "z"})
    return found[0] if isinstance(found, tuple) else found


def rank_main(rank: int, store: str, case: str, rounds: int) -> None:
    """One of two processes; the first prints a line of JSON."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)  # small tensors are drawn as the network is built
    network = network_of(case)
    given = arguments_of(case, 128 if case == "decode" else 64)
    plain = getattr(type(network), CASES[case][3])
    ways = {
        "one": plain,
        "two": method_on(case, network, RankGroup()),
        "share": method_on(case, network, LoneRankGroup()),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks, results = {}, {}
    for number in range(rounds + 1):
        for way, method in ways.items():
            dist.barrier()
            began = time.perf_counter()
            if way != "one" or rank == 0:
                if number:
                    found = called(method, network, given)
                else:  # the first time is not counted: programs are made
                    with counting() as peak:
                        found = called(method, network, given)
                    peaks[way] = peak.most
                results[way] = found
            own = time.perf_counter() - began
            dist.barrier()
            slower = torch.tensor(own)
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            if number:
                seconds[way].append(own if way == "one" else slower.item())
    if rank == 0:
        error = (results["two"] - results["one"]).abs().max() / results["one"].abs().max()
        medians = {way: statistics.median(each) for way, each in seconds.items()}
        peaks = {way: peaks[way] for way in ("one", "two")}
        print(json.dumps({"seconds": medians, "every": seconds, "peaks": peaks, "error": error.item()}), flush=True)


def measured(case: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "--rank", str(rank), "--store", f"{folder}/store",
                 "--cases", case, "--rounds", str(rounds)],
                stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]  # fmt: skip
        said, _ = [rank.communicate()[0] for rank in ranks]
    found: dict[str, Any] = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    one, two, share = (found["seconds"][way] for way in ("one", "two", "share"))
    found |= {"faster": one / two, "ceiling": one / share, "reached": share / two}
    return found | {"memory": found["peaks"]["two"] / found["peaks"]["one"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.store, options.cases, options.rounds)
        return
    before = RESULTS / "ranks-cpu.json"
    rows = json.loads(before.read_text())["rows"] if before.exists() else {}
    for case in options.cases.split(","):
        rows[case] = measured(case, options.rounds) | {"load": os.getloadavg()[0]}
        short = {name: round(rows[case][name], 3) for name in ("faster", "ceiling", "reached", "memory")}
        print(case, short, f"error {rows[case]['error']:.1e}", flush=True)
        write("ranks-cpu", {"rows": rows})


if __name__ == "__main__":
    main()
