"""Networks whose blocks are compiled: weights come and go around what is compiled, and numbers stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tightfit import PlanError, fit
from tiny_pipelines import CASES, run

FLUX = next(case for case in CASES if case.name == "Flux")


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled(how: str) -> tuple[Any, torch.Tensor]:
    """A pipeline whose denoiser is compiled, and its picture."""
    pipe: Any = FLUX.make()
    if how == "whole":
        pipe.transformer.compile(backend="aot_eager")
    else:
        pipe.transformer.compile_repeated_blocks(backend="aot_eager")
    wanted = run(pipe, FLUX)
    counters.clear()
    return pipe, wanted


@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_compiled_blocks_stay_as_they_are(store: str) -> None:
    pipe, wanted = compiled("blocks")
    blocks = [module._compiled_call_impl for module in pipe.transformer.modules()]
    plan = {"components": {"transformer": {"placement": "stream", "offload_to": store}}}
    fitted = fit(pipe, plan=plan, device="loopback", count_activations=False)
    assert fitted.plan.components["transformer"].granularity == "block"
    for _ in range(2):
        assert torch.equal(run(pipe, FLUX), wanted)
        assert [phase.on_demand for phase in fitted.report().trace.phases] == [0, 0, 0]
    assert not counters["stats"]  # nothing was compiled anew
    assert not counters["graph_break"]
    fitted.undo()
    assert [module._compiled_call_impl for module in pipe.transformer.modules()] == blocks
    assert torch.equal(run(pipe, FLUX), wanted)


def test_layers_cannot_come_one_by_one_into_a_compiled_block() -> None:
    pipe, _ = compiled("blocks")
    with pytest.raises(PlanError, match=r"transformer has compiled blocks.*granularity=block"):
        fit(
            pipe,
            plan={"components": {"transformer": {"placement": "stream", "granularity": "layer"}}},
            device="loopback",
        )


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_network_compiled_whole_is_interrupted_by_layers_and_right(after: bool) -> None:
    pipe, wanted = compiled("whole")
    if after:
        pipe = FLUX.make()
    fitted = fit(pipe, level=3, device="loopback", count_activations=False)
    if after:
        pipe.transformer.compile(backend="aot_eager")
    for _ in range(2):
        assert torch.equal(run(pipe, FLUX), wanted)
    assert counters["graph_break"]
    fitted.undo()


def test_out_of_memory_in_a_compiled_block_is_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.plan.component_cost.CHUNK", 8192)
    pipe, wanted = compiled("blocks")
    left = [2]

    block = pipe.transformer.single_transformer_blocks[0]
    work = block._compiled_call_impl

    def failing(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("injected")
        return work(*args, **kwargs)

    block._compiled_call_impl = failing
    plan = {"components": {"transformer": {"placement": "stream", "weight_memory": "1GB"}}}
    fitted = fit(pipe, plan=plan, device="loopback", count_activations=False)
    assert torch.equal(run(pipe, FLUX), wanted)
    assert left == [0]
    assert any("out of memory" in note for note in fitted.report().trace.notes)
    fitted.undo()
