"""Which attention takes a call, and the reason: torch's own rules where they are known, exact ones unless named."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tightfit import PlanError
from tightfit.apply.activations import attention_dispatch
from tightfit.plan.kernel_choice import choose, score_chunk_bytes, torch_kernel
from tightfit.schema.attention import ATTENTION_NAMES, BACKENDS, AttentionCall, check_attention
from tightfit.schema.plan import TECHNIQUES
from tightfit.simulator import attention as simulated

LARGE = AttentionCall(
    device="cuda",
    capability=(8, 9),
    dtype="float16",
    items=1,
    heads=16,
    key_heads=16,
    value_heads=16,
    queries=8192,
    keys=8192,
    width=64,
    value_width=64,
)
CPU = LARGE._replace(device="cpu", capability=None, dtype="float32")
EVERYTHING = ("xformers", "sage")


def calls() -> Iterator[AttentionCall]:
    """Of all kinds that cards tell apart."""
    kinds = itertools.product(
        [(5, 0), (7, 5), (8, 0), (9, 0), (12, 0)],
        ["float32", "float16", "bfloat16"],
        [(64, 64), (64, 32), (60, 60), (200, 200), (264, 264)],
        [("none", 0), ("bool", 4), ("additive", 3)],
        [(16, False), (4, False), (4, True), (5, True)],
        [(False, 8192), (True, 8192), (True, 77), (False, 1)],
    )
    for capability, dtype, widths, mask, heads, shape in kinds:
        yield LARGE._replace(
            capability=capability,
            dtype=dtype,
            width=widths[0],
            value_width=widths[1],
            mask=mask[0],
            mask_dimensions=mask[1],
            key_heads=heads[0],
            value_heads=heads[0],
            grouped=heads[1],
            causal=shape[0],
            keys=shape[1],
        )


def described(call: AttentionCall) -> AttentionCall:
    """`call` as a simulated card describes tensors of that kind."""
    dtype = getattr(torch, call.dtype)
    shapes = (
        (call.heads, call.queries, call.width),
        (call.key_heads, call.keys, call.width),
        (call.value_heads, call.keys, call.value_width),
    )
    parts = [torch.empty(call.items, *shape, dtype=dtype, device="meta") for shape in shapes]
    mask = None
    if call.mask != "none":
        kind = torch.bool if call.mask == "bool" else dtype
        mask = torch.empty((1,) * (call.mask_dimensions - 2) + (call.queries, call.keys), dtype=kind, device="meta")
    return simulated._describe(*parts, mask, call.dropout, call.causal, call.grouped)


def test_a_plan_says_of_a_card_what_a_simulated_card_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It describes a call alike and, in the order that torch itself has, takes the same kernel; or there is none."""
    titles = {
        "flash": "torch's flash attention",
        "efficient": "torch's memory-efficient attention",
        "cudnn": "cuDNN's attention",
    }
    seen = set()
    for call in calls():
        monkeypatch.setattr(simulated, "_capability", lambda _, call=call: call.capability)
        assert described(call) == call
        kernel = simulated._choose(call)
        name, because = choose(call)
        seen.add(kernel)
        assert kernel == torch_kernel(call).kernel
        if kernel == "math":
            assert name == "chunked" or call.score_bytes <= score_chunk_bytes("cuda"), (call, because)
        else:
            assert (name, because.partition(" takes ")[0]) == ("torch", titles[kernel]), (call, because)
    assert seen == {*titles, "math"}


@pytest.mark.parametrize(
    ("change", "kernel", "refused"),
    [
        ({}, "flash", None),
        ({"capability": (9, 0)}, "cudnn", None),
        ({"capability": (9, 0), "width": 256, "value_width": 256}, "flash", "heads of 256, more than 128"),
        ({"width": 512, "value_width": 512}, "efficient", "heads of 512, more than 256"),
        ({"dtype": "float32"}, "efficient", "float32"),
        ({"dtype": "bfloat16", "capability": (7, 5)}, "math", "bfloat16"),
        ({"mask": "bool", "mask_dimensions": 4}, "efficient", "a mask"),
        ({"widths_match": False}, "math", "heads of queries and keys of different widths"),
        ({"device": "cpu", "capability": None, "dtype": "float32", "dimensions": 3}, "math", "3 dimensions"),
    ],
)
def test_torchs_choice_and_what_the_one_before_does_not_take(
    change: dict[str, Any], kernel: str, refused: str | None
) -> None:
    assert torch_kernel(LARGE._replace(**change)) == (kernel, refused)


def test_nothing_lossy_is_chosen_unless_it_is_named() -> None:
    for call in calls():
        assert choose(call, installed=EVERYTHING).name != "sage"
        for wanted in ATTENTION_NAMES:
            if wanted != "sage":
                assert choose(call, wanted, EVERYTHING).name != "sage"
    assert choose(LARGE, "sage", EVERYTHING) == ("sage", "SageAttention was asked for")


@pytest.mark.parametrize(
    ("change", "name", "because"),
    [
        ({}, "torch", "torch's flash attention takes it, by torch's own choice"),
        ({"width": 63, "value_width": 63, "dtype": "float32"}, "chunked", "heads of 63, no multiple of 4"),
        ({"capability": (7, 5), "dtype": "bfloat16"}, "chunked", "takes bfloat16, and all scores would be 4 GiB"),
        ({"capability": (3, 7)}, "chunked", "takes compute capability 3.7, less than 5.0"),
        ({"key_heads": 4, "value_heads": 4, "mask": "bool", "mask_dimensions": 4, "grouped": True}, "chunked",
         "16 heads of queries for 4 of keys and 4 of values"),
        ({"dimensions": 3}, "chunked", "3 dimensions"),
        ({"in_rows": False}, "chunked", "rows that are spread out in memory"),
        ({"dimensions": 3, "queries": 77, "keys": 77}, "torch", "but all scores are only 371 KiB"),
        ({"dimensions": 3, "dropout": 0.1}, "torch", "only torch takes dropout of 0.1"),
        ({"device": "mps", "capability": None}, "torch", "nothing is known here of the kernels for mps"),
    ],
)  # fmt: skip
def test_the_choice_for_a_card_and_why(change: dict[str, Any], name: str, because: str) -> None:
    choice = choose(LARGE._replace(**change))
    assert choice.name == name
    assert because in choice.because


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"dimensions": 3}, "3 dimensions"),
        ({"dimensions": 5}, "5 dimensions"),
        ({"value_width": 32}, "heads of 64 with values of 32"),
        ({"mask": "additive", "mask_dimensions": 3}, "a mask of 3 dimensions"),
        ({"mask": "additive", "mask_dimensions": 4, "mask_requires_grad": True}, "a mask that wants gradients"),
        ({"in_rows": False}, "rows that are spread out in memory"),
        ({"items_match": False}, "batches of different sizes"),
    ],
)
def test_where_a_cpu_would_make_the_whole_matrix(change: dict[str, Any], because: str) -> None:
    call = CPU._replace(**change)
    assert choose(call) == ("chunked", f"no fused kernel of torch's takes {because}, and all scores would be 4 GiB")
    assert choose(call, chunk_bytes=2**32).name == "torch"
    assert choose(CPU).name == "torch"


def test_what_cannot_take_a_call_gives_way_and_says_so() -> None:
    masked = LARGE._replace(mask="bool", mask_dimensions=4)
    assert choose(masked, "flash") == (
        "torch",
        "torch's flash attention does not take a mask; "
        "torch's memory-efficient attention takes it, by torch's own choice",
    )
    assert "SageAttention does not take a mask" in choose(masked, "sage", EVERYTHING).because
    assert (
        "does not take heads of 192, more than 128"
        in choose(LARGE._replace(width=192, value_width=192), "sage", EVERYTHING).because
    )
    assert (
        "does not take compute capability 7.5, less than 8.0"
        in choose(LARGE._replace(capability=(7, 5)), "sage", EVERYTHING).because
    )
    assert choose(LARGE, "sage").because.startswith(
        "SageAttention does not take anything: it is not installed; torch's"
    )
    assert choose(CPU, "cudnn").because.startswith("cuDNN's attention does not take tensors on the CPU; torch's flash")
    assert choose(LARGE._replace(dropout=0.5), "chunked").name == "torch"


def test_xformers_takes_what_torch_would_make_whole() -> None:
    old = LARGE._replace(capability=(7, 5), dtype="float16", width=68, value_width=68)
    assert choose(old).name == "chunked"
    assert choose(old, installed=EVERYTHING).name == "chunked"  # 68 is no multiple of 8 for xFormers, either
    masked = LARGE._replace(mask="additive", mask_dimensions=4, mask_in_rows=False)
    assert choose(masked, installed=EVERYTHING).name == "xformers"
    assert choose(masked).name == "chunked"
    assert choose(LARGE, "xformers", EVERYTHING) == ("xformers", "xFormers' attention was asked for")


def test_names() -> None:
    assert [check_attention(name) for name in ATTENTION_NAMES] == list(ATTENTION_NAMES)
    with pytest.raises(PlanError, match="unknown attention 'chunk': did you mean 'chunked'"):
        check_attention("chunk")
    assert choose(LARGE, "torch").name == choose(CPU, "torch").name == "torch"
    assert choose(LARGE, "math").name == "math"


def test_each_backend_has_a_function_and_a_known_technique() -> None:
    assert {*attention_dispatch._ATTEND} == {*ATTENTION_NAMES} - {"auto"}
    assert {backend.technique for backend in BACKENDS.values() if backend.technique} <= TECHNIQUES.keys()
