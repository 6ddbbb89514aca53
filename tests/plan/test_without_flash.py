"""torch that was compiled without flash attention for cards, as for Windows and ROCm at times."""

from __future__ import annotations

from tightfit.plan.kernel_choice import attention_reasons, choose, torch_kernel
from tightfit.schema.attention import AttentionCall
from tightfit.schema.footprint import Component
from tightfit.schema.machine import Accelerator
from tightfit.schema.plan import ComponentPlan

GROUPED = AttentionCall(
    device="cuda", capability=(8, 9), dtype="bfloat16", items=1, heads=32, key_heads=8, value_heads=8,
    queries=16384, keys=16384, width=128, value_width=128, grouped=True,
)  # fmt: skip


def test_grouped_heads_go_in_chunks() -> None:
    assert choose(GROUPED).name == "torch"
    found = choose(GROUPED._replace(flash=False))
    assert found.name == "chunked"
    assert "32 heads of queries for 8 of keys" in found.because


def test_others_have_the_next_kernel() -> None:
    alike = GROUPED._replace(key_heads=32, value_heads=32)
    assert torch_kernel(alike).kernel == "flash"
    assert torch_kernel(alike._replace(flash=False)).kernel == "efficient"


def test_a_plan_says_so() -> None:
    network = Component(
        name="transformer", class_name="Network", role="denoiser", bytes=8, dtypes={"bfloat16": 8}, head_widths=(128,)
    )
    card = Accelerator(name="cuda:0", kind="cuda", bytes=8, compute_capability="8.9")
    ((said, _),) = attention_reasons(network, ComponentPlan(), card)
    assert "flash" in said
    ((said, because),) = attention_reasons(network, ComponentPlan(), card.model_copy(update={"flash": False}))
    assert "memory-efficient" in said
    assert "torch was compiled without it" in because
