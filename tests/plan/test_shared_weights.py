"""Ranks that share one copy of weights in host memory each count their part of it."""

from __future__ import annotations

from plan.test_planner import CARD, MIB, component, passes_of, phase
from tightfit.plan.component_cost import ComponentCost
from tightfit.plan.cost_model import CostModel
from tightfit.plan.planner import make_plan
from tightfit.plan.rank_choice import shared_weights_reason
from tightfit.schema.footprint import Footprint
from tightfit.schema.machine import Accelerator, Budget, Machine
from tightfit.schema.plan import ComponentPlan, Plan
from tightfit.schema.request import Request

LAYERS = [40 * MIB] * 10
UNET = component("unet", "denoiser", LAYERS, 0)
CALL = Footprint(
    pipeline="T", components=(UNET,), request=Request(height=64),
    phases=(phase("denoise", passes_of(UNET, [1] * 10, 4, 1), MIB),),
)  # fmt: skip


def planned(ranks: int, ram: int) -> Plan:
    card = CARD.model_copy(update={"ranks_sharing_weights": ranks})
    return make_plan(CALL, Machine(accelerators=(card,), ram=2**35, cores=2), Budget(device=200 * MIB, ram=ram))


def test_a_limit_of_host_memory_holds_a_part_for_each_rank() -> None:
    half = UNET.bytes // 2 + MIB
    assert planned(1, half).components["unet"].offload_to == "disk"
    assert planned(2, half).components["unet"].offload_to == "cpu"
    assert planned(2, half - 2 * MIB).components["unet"].offload_to == "disk"
    assert planned(1, UNET.bytes).components["unet"].offload_to == "cpu"


def test_weights_on_the_device_and_in_files_take_none() -> None:
    def counted(ranks: int, plan: ComponentPlan) -> int:
        card: Accelerator = CARD.model_copy(update={"ranks_sharing_weights": ranks})
        return ComponentCost(UNET, plan, card, CostModel(UNET, card)).ram_bytes

    assert counted(4, ComponentPlan(placement="offload")) == UNET.bytes / 4
    assert counted(2, ComponentPlan(placement="resident")) == 0
    assert counted(2, ComponentPlan(placement="offload", offload_to="disk")) == 0


def test_the_plan_says_so() -> None:
    plan = planned(2, UNET.bytes)
    reason = shared_weights_reason(plan, 2)
    assert reason is not None
    assert reason.decision == "one copy in host memory of unet"
    assert shared_weights_reason(plan, 1) is None
    assert shared_weights_reason(planned(2, MIB), 2) is None  # all of it is in files
