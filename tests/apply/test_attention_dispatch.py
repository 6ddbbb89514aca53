"""The attention dispatcher: every network's attention passes through it while it works, and nothing is left after."""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import inspect
import itertools
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_processor as processors
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from inspection import assert_same, imprint
from more_pipelines import MORE_CASES
from simulator.conftest import ACCELERATOR
from tightfit import PlanError
from tightfit.apply.activations.attention_dispatch import AttentionDispatcher
from tightfit.apply.activations.chunked_attention import Scores
from tightfit.devices.device import CpuDevice
from tightfit.devices.simulated import SimulatedDevice
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, TinyCase, run

ATTENTION = F.scaled_dot_product_attention
SCORES = [vars(owner)["get_attention_scores"] for owner in (Attention, AttentionModuleMixin)]
EPSILON = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is ATTENTION
    assert [vars(owner)["get_attention_scores"] for owner in (Attention, AttentionModuleMixin)] == SCORES


def dispatcher(
    wanted: str = "chunked", told: list[str] | None = None, chunk_bytes: int | None = None
) -> AttentionDispatcher:
    return AttentionDispatcher(wanted, CpuDevice(), (told if told is not None else []).append, chunk_bytes=chunk_bytes)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


class Largest(TorchDispatchMode):
    """What the largest matrix of scores was, and which fused kernels ran."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.fused: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "softmax" in name:
            self.bytes = max(self.bytes, args[0].nbytes)
        if name.startswith("_scaled_dot_product"):
            self.fused.add(name)
            self.bytes = max(self.bytes, args[0].shape[:-1].numel() * args[1].shape[-2] * 4)  # of a whole matrix
        return func(*args, **(kwargs or {}))


# pipelines

QUICK = ("StableDiffusion", "StableDiffusion3", "Flux", "WanImageToVideo", "PixArtSigma", "QwenImage")
EAGER = ("Sana", "HiDreamImage")  # whose language models make their scores by themselves
ALL = [case for case in (*CASES, *MORE_CASES) if case.name not in EAGER]
WORKSPACE = 8_519_680  # bytes that cuBLAS takes
BLOCK = 4096  # bytes of scores, less than any denoiser here would make


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in ALL],
)
def test_no_pipeline_makes_its_scores(case: TinyCase) -> None:
    pipe: Any = case.make()
    with Largest() as whole:
        wanted = run(pipe, case)
    before = imprint(pipe)
    chunked = dispatcher(chunk_bytes=BLOCK)
    with chunked.working(), Largest() as largest:
        result = run(pipe, case)
        assert_same(before, imprint(pipe))  # nothing is set on modules
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-5)  # pictures, 0 to 1, through all steps
    assert whole.bytes > BLOCK >= largest.bytes > 0
    assert not largest.fused
    assert set(chunked.calls) == {"chunked"}


def test_auto_changes_no_bit_where_torch_has_a_kernel_nor_does_what_was_switched_off() -> None:
    case = CASES[0]
    pipe: Any = case.make()
    wanted, told = run(pipe, case), []
    auto = dispatcher("auto", told)
    with auto.working():
        assert torch.equal(run(pipe, case), wanted)
    assert set(auto.calls) == {"torch"}
    assert told == []
    with dispatcher().working():
        assert not torch.equal(run(pipe, case), wanted)
    assert torch.equal(run(pipe, case), wanted)


def test_every_attention_of_diffusers_ends_in_what_is_replaced() -> None:
    """Who computes a softmax of scores in its own way. What is listed makes them whole, whatever is chosen."""
    known = {
        "models/attention.py:get_attention_scores",
        "models/attention_processor.py:get_attention_scores",
        "models/autoencoders/autoencoder_kl_ltx2_audio.py:forward",  # an audio autoencoder's block
        "models/unets/unet_1d_blocks.py:forward",  # of one-dimensional U-Nets
        "models/embeddings.py:forward",  # pooling: one query
        "models/condition_embedders/condition_embedder_minimax_music3.py:forward",  # weights of layers, no scores
        "pipelines/kolors/text_encoder.py:forward",  # for torch 1
        "pipelines/latent_diffusion/pipeline_latent_diffusion.py:forward",  # text of 77 tokens
    }
    root = Path(inspect.getfile(diffusers)).parent
    found = set()
    for file in root.rglob("*.py"):
        text = file.read_text()
        for function in ast.walk(ast.parse(text)) if "softmax(" in text else ():
            if isinstance(function, ast.FunctionDef):
                names = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
                if "softmax" in names and names & {"bmm", "matmul", "einsum", "baddbmm"}:
                    found.add(f"{file.relative_to(root)}:{function.name}")
    assert found == known


# processors that ask for their scores

HEADS, WIDTH = 2, 16


def attention_layer(**settings: Any) -> Attention:
    torch.manual_seed(0)
    return Attention(query_dim=WIDTH, heads=HEADS, dim_head=WIDTH // HEADS, **settings).eval()


ADDED = {"added_kv_proj_dim": WIDTH, "norm_num_groups": 2, "bias": True}
PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (processors.AttnProcessor, {}),
    "upcast": (processors.AttnProcessor, {"upcast_attention": True, "upcast_softmax": True}),
    "sliced": (lambda: processors.SlicedAttnProcessor(1), {}),
    "added": (processors.AttnAddedKVProcessor, ADDED),
    "sliced-added": (lambda: processors.SlicedAttnAddedKVProcessor(1), ADDED),
    "custom": (lambda: processors.CustomDiffusionAttnProcessor(True, True, WIDTH, WIDTH), {}),
    "ip-adapter": (lambda: processors.IPAdapterAttnProcessor(WIDTH, WIDTH, (4,)), {}),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("make", "settings"), PROCESSORS.values(), ids=PROCESSORS)
def test_older_processors_need_no_scores(make: Any, settings: dict[str, Any], masked: bool) -> None:
    layer = attention_layer(**settings)
    layer.set_processor(make())
    added = "added_kv_proj_dim" in settings
    hidden, text, picture = (torch.randn(2, many, WIDTH) for many in (64, 32 if added else 64, 4))
    inputs: Any = {"hidden_states": hidden.mT.reshape(2, WIDTH, 8, 8) if added else hidden}
    inputs["encoder_hidden_states"] = (text, [picture]) if isinstance(layer.processor, torch.nn.Module) else text
    if isinstance(layer.processor, processors.CustomDiffusionAttnProcessor):
        inputs["encoder_hidden_states"] = text
    if masked:
        inputs["attention_mask"] = torch.randn(2, 1, 32 if added else 64)  # padded for the keys that are added
    with torch.no_grad(), Largest() as whole:
        wanted = layer(**inputs)
    assert whole.bytes >= 64 * 64 * 4
    chunked = dispatcher(chunk_bytes=1024)
    with torch.no_grad(), chunked.working(), Largest() as largest:
        result = layer(**inputs)
    torch.testing.assert_close(result, wanted, rtol=0, atol=8 * EPSILON)
    assert largest.bytes <= 1024
    assert chunked.calls.total() >= 1
    small = dispatcher("auto")
    with torch.no_grad(), small.working():
        assert torch.equal(layer(**inputs), wanted)  # so few scores are made as they were
    assert not small.calls


def test_a_fused_kernel_of_torch_takes_the_place_of_scores() -> None:
    layer = attention_layer()
    layer.set_processor(processors.AttnProcessor())
    hidden, told = torch.randn(2, 64, WIDTH), []
    auto = dispatcher("auto", told, chunk_bytes=1024)
    with torch.no_grad(), auto.working(), Largest() as largest:
        layer(hidden)
    assert largest.fused == {"_scaled_dot_product_flash_attention_for_cpu"}
    assert (auto.calls, told) == ({"torch": 1}, [])


class Nosy(processors.AttnProcessor):
    """Looks at the scores, and changes them, as those of prompt-to-prompt editing do."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        query, key, value = (attn.head_to_batch_dim(part(hidden_states)) for part in (attn.to_q, attn.to_k, attn.to_v))
        shares = attn.get_attention_scores(query, key)
        assert shares.shape == (2 * HEADS, 64, 64)
        assert shares.dtype == hidden_states.dtype
        shares[:, :, :32] *= 2
        self.sums = shares.sum(-1)
        return attn.batch_to_head_dim(shares @ value)


def test_scores_that_somebody_looks_at_are_made() -> None:
    layer, hidden = attention_layer(), torch.randn(2, 64, WIDTH)
    layer.set_processor(Nosy())
    with torch.no_grad():
        wanted = layer(hidden)
        sums = layer.processor.sums
        with dispatcher(chunk_bytes=1024).working():
            assert torch.equal(layer(hidden), wanted)
    assert type(layer.processor.sums) is torch.Tensor
    assert torch.equal(layer.processor.sums, sums)


def test_products_with_promised_scores() -> None:
    matrix, values = torch.rand(2, 3, 3), torch.rand(2, 3, 4)
    for product in (torch.bmm, torch.matmul, torch.Tensor.matmul, lambda a, b: a @ b):
        promised = Scores.promise((2, 3, 3), values, lambda: pytest.fail("made"), lambda value: value + 1)
        assert torch.equal(product(promised, values), values + 1)  # type: ignore[operator]
    promised = Scores.promise((2, 3, 3), values, matrix.clone, lambda value: pytest.fail("attended"))
    assert torch.equal(torch.bmm(promised.mul_(2), values), torch.bmm(2 * matrix, values))
    assert torch.equal(torch.bmm(promised, values), torch.bmm(2 * matrix, values))


# who is asked


def attend(*parts: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*parts, **settings)


def test_only_the_component_that_works_is_asked_and_only_in_its_thread() -> None:
    parts = drawn(1, 2, 64, 8)
    outer, inner, torchs = dispatcher(), dispatcher(), dispatcher("torch")
    other: list[torch.Tensor] = []
    plain = attend(*parts)
    with outer.working():
        attend(*parts)
        with inner.working():
            attend(*parts)
            with torchs.working():
                assert torch.equal(attend(*parts), plain)
        thread = threading.Thread(target=lambda: other.append(attend(*parts)))
        thread.start()
        thread.join()
        attend(*parts)
    assert torch.equal(other[0], plain)
    assert (outer.calls, inner.calls, torchs.calls) == ({"chunked": 2}, {"chunked": 1}, {"torch": 1})


def test_threads_may_begin_and_end_in_any_order() -> None:
    first, second, barrier = dispatcher(), dispatcher(), threading.Barrier(2)

    def work() -> None:
        with second.working():
            barrier.wait()
            barrier.wait()
            attend(*drawn(1, 2, 64, 8))

    thread = threading.Thread(target=work)
    with first.working():
        thread.start()
        barrier.wait()
    barrier.wait()
    thread.join()
    assert (first.calls, second.calls) == ({}, {"chunked": 1})


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), dispatcher().working():
        raise ZeroDivisionError
    plain = attend(*drawn(1, 2, 64, 8))
    assert torch.equal(plain, ATTENTION(*drawn(1, 2, 64, 8)))


def test_somebody_elses_replacement_is_used_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: list[str] = []

    def replacement(*args: Any, **kwargs: Any) -> torch.Tensor:
        theirs.append("called")
        return ATTENTION(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", replacement)
        with dispatcher("auto").working():
            attend(*drawn(1, 2, 64, 8))
        assert F.scaled_dot_product_attention is replacement
        assert theirs == ["called"]
        with dispatcher().working():
            F.scaled_dot_product_attention = replacement
        assert F.scaled_dot_product_attention is replacement


class Skipping(TorchFunctionMode):
    """As diffusers' layer skipping does it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return args[2]
        return func(*args, **(kwargs or {}))


def test_modes_that_look_for_attention_find_it() -> None:
    parts = drawn(1, 2, 64, 8)
    with dispatcher().working(), Skipping():
        assert torch.equal(attend(*parts), parts[2])


def test_what_learns_or_casts_is_left_to_torch() -> None:
    parts, chunked = drawn(1, 2, 64, 8), dispatcher()
    with chunked.working():
        attend(parts[0].requires_grad_(), *parts[1:]).sum().backward()
        assert parts[0].grad is not None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert attend(*parts).dtype == torch.bfloat16
    assert not chunked.calls


# which is chosen


def inputs_of_all_kinds() -> Iterator[tuple[list[torch.Tensor], dict[str, Any]]]:
    query, key, value = drawn(2, 4, 16, 8)
    yield from (([part.to(dtype) for part in (query, key, value)], {}) for dtype in (torch.float64, torch.bfloat16))
    changed = [
        (query, key, value[..., :4].contiguous()), (query[0], key[0], value[0]), (query[None], key[None], value[None]),
        (query.mT.contiguous().mT, key, value), (query, key[:1], value[:1]), (query, key[:, :, :9], value[:, :, :9]),
        (query, key, value),
    ]  # fmt: skip
    masks = [(16, 16), (2, 1, 1, 16), (4, 16, 16), (16, 1), (2, 4, 16, 1)]
    for parts in changed:
        yield list(parts), {}
        yield list(parts), {"is_causal": True}
    for shape, dtype in itertools.product(masks, (torch.bool, torch.float32)):
        yield [query, key, value], {"attn_mask": torch.ones(shape, dtype=dtype)}
    yield [query, key, value], {"attn_mask": torch.ones(16, 16, requires_grad=True)}
    yield [query, key, value], {"attn_mask": torch.ones(16, 16).mT}
    for heads in (1, 2):
        yield [query, key[:, :heads], value[:, :heads]], {"enable_gqa": True}


def test_chunked_takes_from_a_cpu_exactly_what_would_become_a_whole_matrix() -> None:
    seen = set()
    for parts, settings in inputs_of_all_kinds():
        told: list[str] = []
        auto = dispatcher("auto", told, chunk_bytes=1)
        fused = torch._fused_sdp_choice(*parts, **settings) == SDPBackend.FLASH_ATTENTION.value
        wanted = ATTENTION(*parts, **settings)
        with torch.no_grad(), auto.working():
            result = attend(*parts, **settings)
        assert auto.calls == {"torch" if fused else "chunked": 1}, (settings, [part.shape for part in parts])
        assert len(told) == (not fused)
        assert torch.equal(result, wanted) if fused else (result - wanted).abs().max() < 8 * EPSILON
        seen.add(fused)
    assert seen == {True, False}


def test_what_is_told_is_the_reason() -> None:
    told: list[str] = []
    parts = drawn(1, 1, 2, 64, 8)
    with dispatcher("auto", told, chunk_bytes=1024).working():
        attend(*parts)
        attend(*(part + 1 for part in parts))
    reason = "no fused kernel of torch's takes 5 dimensions, and all scores would be 32 KiB"
    assert told == [f"chunked for 64 queries and 64 keys: {reason}"] * 2


def test_torchs_kernels_by_name() -> None:
    parts = drawn(1, 2, 64, 8)
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("math", SDPBackend.MATH)):
        with sdpa_kernel(backend):
            wanted = attend(*parts)
        named = dispatcher(name)
        with named.working():
            assert torch.equal(attend(*parts), wanted)
        assert named.calls == {name: 1}
    told: list[str] = []
    cudnn = dispatcher("cudnn", told)
    with cudnn.working():
        attend(*parts)
    assert cudnn.calls == {"torch": 1}
    assert "cuDNN's attention does not take tensors on the CPU" in told[0]
    with pytest.raises(PlanError, match="unknown attention 'flesh': did you mean 'flash'"):
        dispatcher("flesh")


def test_a_kernel_that_refuses_unexpectedly_gives_way() -> None:
    told: list[str] = []
    flash = dispatcher("flash", told)
    value = drawn(1, 2, 64, 8)[2]
    flash._choose = lambda *_: ("flash", None)  # type: ignore[method-assign]
    with flash.working():
        attend(value, value, value[..., :4])  # which it does not take, whatever we think
    assert flash.calls == {"torch": 1}
    assert "flash refused a call of (1, 2, 64, 8), unexpectedly: No available kernel" in told[0]


# packages that are not installed here: stand-ins with the signatures of the real ones


def module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(members)
    return made


class LowerTriangularMask:
    pass


def memory_efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None,
) -> torch.Tensor:  # fmt: skip
    """(B, M, H, K) in and out; masks of the queries' dtype, whole shape and aligned rows."""
    assert p == 0
    causal = isinstance(attn_bias, LowerTriangularMask)
    mask = None if causal else attn_bias
    if mask is not None:
        assert mask.shape == (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        assert mask.dtype == query.dtype
        assert mask.stride(-1) == 1
        assert all(step % 8 == 0 for step in mask.stride()[:-1])
    heads = (part.transpose(1, 2) for part in (query, key, value))
    return ATTENTION(*heads, attn_mask=mask, is_causal=causal, scale=scale).transpose(1, 2)


def sageattn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    sm_scale: float | None = None, return_lse: bool = False, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    assert tensor_layout == "HND"
    if q.shape[-2] == 13:
        raise ValueError("Unsupported length: 13\nand more")
    return ATTENTION(q, k, v, is_causal=is_causal, scale=sm_scale)


@pytest.fixture
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = {"memory_efficient_attention": memory_efficient_attention, "LowerTriangularMask": LowerTriangularMask}
    for made in (module("xformers"), module("xformers.ops", **operations), module("sageattention", sageattn=sageattn)):
        monkeypatch.setitem(sys.modules, made.__name__, made)


@contextlib.contextmanager
def simulated_card(capability: str) -> Iterator[SimulatedCard]:
    card = SimulatedCard(0, ACCELERATOR.model_copy(update={"compute_capability": capability}), Host(), "real")
    use_cards([card])
    try:
        yield card
    finally:
        use_cards(())


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize("mask", ["none", "causal", "truth", "added", "unaligned"])
def test_xformers(mask: str) -> None:
    query, key, value = drawn(1, 2, 64, 8)
    keys = 61 if mask == "unaligned" else 64
    parts, settings = [query, key[:, :, :keys], value[:, :, :keys]], {"is_causal": mask == "causal"}
    if mask == "truth":
        settings["attn_mask"] = (torch.arange(64) > 5)[None]
    elif mask in ("added", "unaligned"):
        settings["attn_mask"] = torch.randn(1, 1, 64, keys)
    wanted = attend(*parts, **settings)
    with simulated_card("8.0"):
        there = {
            name: part.to("privateuseone") if isinstance(part, torch.Tensor) else part
            for name, part in settings.items()
        }
        xformers = AttentionDispatcher("xformers", SimulatedDevice())
        with torch.no_grad(), xformers.working():
            result = attend(*(part.to("privateuseone") for part in parts), **there).cpu()
    assert xformers.calls == {"xformers": 1}
    torch.testing.assert_close(result, wanted, rtol=0, atol=8 * EPSILON)


@pytest.mark.usefixtures("_packages")
def test_sage_only_by_name_and_only_what_it_takes() -> None:
    told: list[str] = []
    parts = drawn(1, 2, 64, 64, dtype=torch.bfloat16)
    wanted = attend(*parts)
    with simulated_card("8.0"), torch.no_grad():
        there = [part.to("privateuseone") for part in parts]
        sage, auto = (
            AttentionDispatcher("sage", SimulatedDevice(), told.append),
            AttentionDispatcher("auto", SimulatedDevice(), chunk_bytes=1),
        )
        with sage.working():
            assert torch.equal(attend(*there).cpu(), wanted)
            attend(*there, attn_mask=torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device="privateuseone"))
            attend(*(part[:, :, :13] for part in there))
        with auto.working():
            attend(*there)
    assert sage.calls == {"sage": 1, "torch": 2}
    assert "SageAttention does not take a mask; torch's memory-efficient attention takes it" in told[0]
    assert told[1] == "sage refused a call of (1, 2, 13, 64), unexpectedly: Unsupported length: 13"
    assert auto.calls == {"torch": 1}


def test_an_old_simulated_card_needs_no_scores() -> None:
    """bfloat16 on compute capability 7.5, for which torch has no fused kernel."""
    parts, peaks = drawn(1, 2, 512, 64, dtype=torch.bfloat16), []
    for wanted in ("torch", "auto"):
        with simulated_card("7.5") as card, torch.no_grad():
            there = [part.to("privateuseone") for part in parts]
            one = AttentionDispatcher(wanted, SimulatedDevice(), chunk_bytes=2**16)
            before = card.live.now
            card.live.reset_peak()
            with one.working():
                result = attend(*there).cpu()
            peaks.append(card.live.peak - before)
        torch.testing.assert_close(result, attend(*parts), rtol=0.02, atol=0.004)
    assert one.calls == {"chunked": 1}
    assert peaks[1] - WORKSPACE < 2**16 * 3 + 3 * 512 * 64 * 4 < 2 * 512 * 512 * 4 < peaks[0] - WORKSPACE


# compiled blocks


@pytest.fixture
def _forget_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_forget_compiled")
def test_compiled_blocks_stay_whole_and_come_back() -> None:
    layer, hidden, chunked = attention_layer(), torch.randn(2, 64, WIDTH), dispatcher(chunk_bytes=1024)
    layer.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        wanted = layer(hidden)
        for graphs in (1, 0, 0):
            counters.clear()
            with chunked.working():
                torch.testing.assert_close(layer(hidden), wanted, rtol=0, atol=8 * EPSILON)
            assert torch.equal(layer(hidden), wanted)
            assert counters["stats"].get("unique_graphs", 0) == graphs  # one for the dispatcher, once
    assert chunked.calls == {"chunked": 3}
