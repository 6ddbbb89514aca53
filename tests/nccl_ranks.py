"""One rank of a process group on cards that tries NCCL's collectives beside the CPU's arithmetic, as context_ranks."""

from __future__ import annotations

import itertools
from typing import Any

from context_ranks import Trial, counts, main

SIZE = 33


def tried(rank: int, trial: Trial) -> Trial:
    """{"wrong": the operations whose result is not the CPU's}, or what follows where a wait is left out."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    if trial.get("without_wait"):
        return without_wait(rank)
    dtype = getattr(torch, trial["dtype"])
    values = [_values(torch, each, dtype) for each in range(dist.get_world_size())]
    return {"wrong": wrong(rank, values), "counts": counts()}


def without_wait(rank: int) -> dict[str, Any]:
    """Sum three times. In the second or the third sum this rank reads before the other one has begun it."""
    import torch
    import torch.distributed as dist

    large = torch.ones(1 << 16, device="cuda")
    dist.all_reduce(large)
    found = None
    for early in range(2):
        if rank != early:
            dist.all_reduce(torch.zeros(1))  # by gloo: begins when the other has read
        work = dist.all_reduce(large, async_op=True)
        if rank == early:
            found = (large * 1).cpu()  # with what was there before
            dist.all_reduce(torch.zeros(1))
        work.wait()
    return {"found": found.unique().tolist(), "after": (large * 1).cpu().unique().tolist(), "counts": counts()}


def _values(torch: Any, rank: int, dtype: Any) -> Any:
    """Any numbers, the same on every rank; sums of two are exact or rounded once."""
    drawn = torch.randint(1, 100, (SIZE,), generator=torch.Generator().manual_seed(rank))
    return (drawn.double() / 7).to(dtype) if dtype.is_floating_point else drawn.to(dtype)


def wrong(rank: int, values: list[Any]) -> list[str]:
    import torch
    import torch.distributed as dist

    found: dict[str, tuple[Any, Any]] = {}  # what NCCL gave, and the CPU
    own, size, dtype = values[rank].cuda(), len(values), values[0].dtype
    wide = [value.float() if dtype in (torch.half, torch.bfloat16) else value for value in values]
    sums = {
        "SUM": sum(wide[1:], wide[0]), "PRODUCT": wide[0] * wide[1], "MAX": torch.stack(wide).amax(0),
        "MIN": torch.stack(wide).amin(0), "AVG": sum(wide[1:], wide[0]) / size,
    }  # fmt: skip
    for name, expected in sums.items():
        if name == "AVG" and not dtype.is_floating_point:
            continue
        rounded, kind = expected.to(dtype), getattr(dist.ReduceOp, name)
        dist.all_reduce(reduced := own.clone(), kind)
        found[f"all_reduce {name}"] = reduced, rounded
        dist.reduce(reduced := own.clone(), 1, kind)
        if rank == 1:
            found[f"reduce {name}"] = reduced, rounded
        whole = torch.cat([own] * size)
        dist.reduce_scatter_tensor(scattered := torch.empty_like(own), whole, kind)
        found[f"reduce_scatter {name}"] = scattered, rounded
    dist.all_gather(gathered := [torch.empty_like(own) for _ in values], own)
    found["all_gather"] = torch.stack(gathered), torch.stack(values)
    dist.all_gather_into_tensor(joined := own.new_empty(size * SIZE), own)
    found["all_gather_into_tensor"] = joined, torch.cat(values)
    for root in range(size):
        dist.broadcast(told := own.clone(), root)
        found[f"broadcast {root}"] = told, values[root]
    dist.all_to_all_single(swapped := torch.empty_like(own[: size * 8]), own[: size * 8].contiguous())
    found["all_to_all"] = swapped, torch.cat([value[rank * 8 : rank * 8 + 8] for value in values])
    before, after = (rank - 1) % size, (rank + 1) % size
    came = torch.empty_like(own)
    both = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, came, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    found["send and receive"] = came, values[before]
    for sender, receiver in itertools.pairwise(range(size)):
        if rank == sender:
            dist.send(own, receiver)
        if rank == receiver:
            dist.recv(came := torch.empty_like(own), sender)
            found["one way"] = came, values[sender]
    dist.barrier()
    group = dist.new_group()
    dist.all_reduce(summed := own.clone(), group=group)
    found["another group"] = summed, sums["SUM"].to(dtype)
    dist.destroy_process_group(group)
    return [name for name, (got, expected) in found.items() if not torch.equal(got.cpu(), expected)]


if __name__ == "__main__":
    main(tried)
