"""Whole calls within the memory of smaller cards: tightfit beside diffusers' own offloading and diffusers-mm's choice.

    python bench/rivals.py [--budgets 6,8,12,16,24] [--card rtx4090]
    python bench/rivals.py --models sdxl,flux.1-dev --keep      the other rows stay as they were

One simulated card, which has a budget (GiB) and not a byte more, and plenty of RAM; weights are shapes and the clock is
exact. Everybody's pipeline is the unmodified one in bfloat16. Everybody calls it twice, and the second call counts:
whatever is learned or page-locked the first time is there. Where the autoencoder is what does not fit, a rival tries
again with diffusers' tiles, whose pictures are others. Others than tightfit do a few steps; the rest are taken to be
like the last two. What hooks cost the host in Python is not counted, which favours those who have many.

diffusers-mm is compared where it is installed. Writes bench/results/rivals-simulated.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from measuring import RESULTS, write
from rivals_contenders import CONTENDERS, MODELS, OURS, STEPS, Clock, Row, requests_of
from tightfit import Budget, BudgetTooSmall, make_plan, measure_footprint
from tightfit.catalog.known import known_card, known_model
from tightfit.checkpoint.loading import quietly
from tightfit.measure.build_models import build_known
from tightfit.measure.meta_copy import PROMPT
from tightfit.measure.modules import find_components
from tightfit.run.call_arguments import Prompt, call_arguments
from tightfit.run.simulate import SimulationRun
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator, Machine
from tightfit.schema.request import Request
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.host_memory import mark_valueless
from tightfit.simulator.storage import SMALL
from tightfit.simulator.timeline import Host

NAME = "rivals-simulated"
ROOM = 2**50
DTYPE = torch.bfloat16


@contextlib.contextmanager
def card_in_use(like: Accelerator, size: int) -> Iterator[SimulatedCard]:
    card = SimulatedCard(0, like.model_copy(update={"bytes": size}), Host())
    use_cards([card])
    try:
        yield card
    finally:
        use_cards([])


def clock_of(card: SimulatedCard) -> Clock:
    return Clock(lambda: card.now, lambda earlier, later: (later - earlier) * 1e-9)


def ours(model: str, asked: Request, footprint: Footprint, like: Accelerator, size: int) -> Row:
    machine = Machine(accelerators=(like.model_copy(update={"bytes": ROOM}),), ram=ROOM, pinnable=ROOM, cores=1)
    try:
        plan = make_plan(footprint, machine, Budget(device=size))
    except BudgetTooSmall as error:
        return {"refused": str(error), "needed": error.facts["needed_bytes"]}
    with card_in_use(like, size) as card:
        stage = SimulationRun(model, card, plan.model_dump(mode="json", exclude={"device"}), asked, DTYPE)
        clock = clock_of(card)
        try:
            for _ in range(2):
                clock.start()
                stage.run({"callback_on_step_end": clock.mark})
                clock.stop()
        except torch.OutOfMemoryError as error:
            return {"failed": str(error).splitlines()[0]}
        said = {"placements": {name: part.described for name, part in plan.components.items()}}
        told = sum(phase.seconds for phase in plan.forecast)
        return clock.row(asked.steps) | {"peak": card.held.peak, "told": told, **said, "vae": plan.vae.described}


def rival(name: str, model: str, asked: Request, like: Accelerator, size: int, *, tiles: bool) -> Row:
    """One contender's row; where it "failed", whether that was "decoding" or "before"."""
    few = asked.model_copy(update={"steps": STEPS})
    with card_in_use(like, size) as card:
        clock = clock_of(card)
        try:
            pipe = on_hollow_host(build_known(known_model(model), DTYPE))
            pipe.set_progress_bar_config(disable=True)
            arguments = call_arguments(pipe, Prompt(PROMPT, seed=0), few)
            if tiles:
                pipe.vae.enable_tiling()
            ready = CONTENDERS[name](pipe, torch.device("privateuseone:0"))
            for number in range(2):
                clock.start()
                arguments["generator"] = torch.Generator().manual_seed(number)
                with torch.no_grad(), quietly():
                    ready(**arguments, output_type="pt", callback_on_step_end=clock.mark)
                clock.stop()
        except torch.OutOfMemoryError:
            return {"failed": "decoding" if clock.steps == STEPS else "before"}
        chosen = {"chosen": pipe.mm.applied_strategy} if hasattr(pipe, "mm") else {}
        return clock.row(asked.steps) | {"peak": card.held.peak, "tiles": tiles} | chosen


def on_hollow_host(pipe: Any) -> Any:
    """`pipe`, whose weights are ordinary tensors of the host that hold nothing: anybody's way of moving them works."""
    for network in find_components(pipe).values():
        made: dict[torch.Tensor, torch.Tensor] = {}
        for module in network.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not tensor.is_meta and tensor.nbytes > SMALL:
                        mark_valueless(tensor)  # a card will keep its shape alone
                    elif tensor is not None and tensor.is_meta:
                        if tensor not in made:
                            empty = mark_valueless(
                                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                            )
                            made[tensor] = torch.Tensor._make_subclass(type(tensor), empty, tensor.requires_grad)
                        tensors[name] = made[tensor]
    return pipe


def let_data_move() -> None:
    """`parameter.data = …` works across devices as on CUDA: torch refuses it for devices written in Python."""
    usual = torch._C.TensorBase.data

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if tensor.device.type == value.device.type:
            usual.__set__(tensor, value)
        else:
            torch.utils.swap_tensors(tensor, torch.Tensor._make_subclass(type(tensor), value, tensor.requires_grad))

    torch.Tensor.data = property(usual.__get__, set_data)


def rows_of(model: str, asked: Request, like: Accelerator, budgets: list[int], names: list[str]) -> Iterator[Row]:
    footprint = measure_footprint(model, asked, dtype="bfloat16")
    about = {"model": model, "request": asked.described, "steps": asked.steps}
    for name in names:
        last: Row = {}
        for size in sorted(budgets, reverse=True):
            tiles = last.get("tiles", False)
            if name == OURS:
                last = ours(model, asked, footprint, like, size)
            elif name == "diffusers-mm" or (last.get("peak", size + 1) > size and "failed" not in last):
                last = rival(name, model, asked, like, size, tiles=tiles)
                if last.get("failed") == "decoding" and not tiles:
                    last = rival(name, model, asked, like, size, tiles=True)
            yield {**about, "contender": name, "budget": size, **last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--budgets", default="6,8,12,16,24", help="GiB")
    parser.add_argument("--card", default="rtx4090")
    parser.add_argument("--only", default=",".join([OURS, *CONTENDERS]))
    parser.add_argument("--keep", action="store_true", help="what is written of other models and contenders")
    wishes = parser.parse_args()
    logging.disable(logging.WARNING)
    let_data_move()
    names, like = wishes.only.split(","), known_card(wishes.card)
    try:
        theirs = {"diffusers-mm": version("diffusers-mm")}
    except PackageNotFoundError:
        theirs = {}
        names = [name for name in names if name != "diffusers-mm"]
    models, rows = wishes.models.split(","), []
    if wishes.keep:
        written = json.loads((RESULTS / f"{NAME}.json").read_text())["rows"]
        rows = [row for row in written if row["model"] not in models or row["contender"] not in names]
    for model in models:
        for asked in requests_of(model):
            for row in rows_of(model, asked, like, [int(size) * 2**30 for size in wishes.budgets.split(",")], names):
                rows.append(row)
                print(row, flush=True)
        write(NAME, {"card": like.product_name or like.name, **theirs, "rows": rows})  # by and by


if __name__ == "__main__":
    main()
