"""Anything can happen in, to and around a fitted pipeline: its pictures are those of an untouched copy."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import nn

from inspection import assert_same, imprint, relative_error
from more_pipelines import MORE_CASES
from tightfit import Fitted, RunError, fit
from tightfit.measure.modules import find_components, find_role, weight_bytes
from tightfit.schema.stores import STORES
from tiny_pipelines import CASES, TinyCase, run

SD, IMG2IMG, WAN = (
    next(case for case in CASES if case.name == name) for name in ("StableDiffusion", "StableDiffusionImg2Img", "Wan")
)
FUSED = 1e-5  # a fused LoRA is added to the weights in float32 instead of to what they give


ELSEWHERE = [name for name, kind in STORES.items() if not kind.is_host_memory]


@pytest.fixture(params=[f"loopback-{name}" for name in STORES] + [f"cpu-{name}" for name in ELSEWHERE])
def place(request: pytest.FixtureRequest) -> str:
    """A device, and where the masters are."""
    return str(request.param)


def follow(pipe: Any, place: str, **settings: Any) -> Fitted:
    """Denoisers come by units, the rest for its phase."""
    device, store = place.split("-")
    plan = {
        name: {"placement": "stream" if find_role(name, part) == "denoiser" else "offload", "offload_to": store}
        for name, part in find_components(pipe).items()
    }
    return fit(pipe, plan={"components": plan}, device=device, **settings)


@functools.lru_cache
def untouched(name: str) -> torch.Tensor:
    case = next(case for case in (*CASES, *MORE_CASES) if case.name == name)
    return run(case.make(), case)


# other architectures


@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.name)
def test_more_pipelines_are_repeatable_finite_and_varied(case: TinyCase) -> None:
    pipe = case.make()
    pictures = run(pipe, case)
    assert torch.equal(pictures, untouched(case.name))
    assert pictures.isfinite().all()
    assert pictures.std() > 0.05
    assert sum(map(weight_bytes, find_components(pipe).values())) < 3e6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [*MORE_CASES, WAN], ids=lambda case: case.name)
def test_other_architectures(case: TinyCase, place: str) -> None:
    pipe = case.make()
    run(pipe, case)
    before = imprint(pipe)
    fitted = follow(pipe, place)
    rest = fitted.live().weights
    for _ in range(2):
        assert torch.equal(run(pipe, case), untouched(case.name))
        assert fitted.live().weights == rest
    assert all(phase.bytes_in > 0 for phase in fitted.report().trace.phases)
    fitted.undo()
    assert_same(before, imprint(pipe))
    assert torch.equal(run(pipe, case), untouched(case.name))


# what networks do

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.gelu(self.first(x)))


class Network(nn.Module):
    """Uses its blocks in the order that `order` gives for each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.passes = 0

    def order(self) -> list[int]:
        return [0, 1, 2, 3, 4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for index in self.order():
            x = self.blocks[index](x)
        self.passes += 1
        return self.leave(x)


class Skipping(Network):
    def order(self) -> list[int]:
        return [0, 4] if self.passes % 2 else [0, 1, 2, 3, 4]


class Repeating(Network):
    def order(self) -> list[int]:
        return [0, 1, 2, 1, 3, 1, 4]


class Shuffled(Network):
    def order(self) -> list[int]:
        return random.Random(self.passes).choices(range(5), k=7)


class RootOwned(Network):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.mix) * self.mix[0] + self.shift


class Borrowing(Network):
    """Takes a child's weights without calling it; the other one's every other pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.blocks[4].first
        x = F.linear(x, self.enter.weight, self.enter.bias)
        x = F.linear(x, last.weight, last.bias)[..., :WIDTH]
        for block in self.blocks:
            x = block(x)
        self.passes += 1
        return self.leave(x) if self.passes % 2 else x @ self.leave.weight.T + self.leave.bias.data


class Tied(Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].first.weight = self.blocks[1].first.weight
        self.leave.weight = self.enter.weight
        self.blocks[2].second = self.blocks[0].second  # one module in two places


class Remembering(Network):
    """Buffers that change: in place, and for another; small and large."""

    seen: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = super().forward(x) + self.mean[0] * self.seen
        self.mean = 0.5 * self.mean + x.detach().mean(0, keepdim=True).clone()
        return x


class Attending(Network):
    """Attention whose out_proj is never called: torch takes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, attention in enumerate(self.attention):
            x = x + attention(x[None], x[None], x[None], need_weights=bool(number))[0][0]
        return super().forward(x)


class Encoding(Network):
    """A layer for which torch has a path of its own, that takes all its weights at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layer(x[None])[0])


class Normed(Network):
    """Weights that are computed whenever they are looked at, in both ways that torch has."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            self.old = torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.new(self.old(x)))


class Recurrent(Network):
    """Keeps a list of its own of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.memory(x)[0])


class Nested(Network):
    """Calls a block inside another's pass, and a block that raises and is caught."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functools.partial(Block.forward, self.blocks[0])
        with contextlib.suppress(RuntimeError):
            self.blocks[1](x[:, :3])
        handle = self.blocks[2].first.register_forward_hook(
            lambda _, __, y: torch.cat([self.blocks[2](x), y], -1)[:, -2 * WIDTH :] if not nested.pop() else None
        )
        nested = [True, False]
        x = super().forward(inner(x))
        handle.remove()
        return x


KINDS = [Network, Skipping, Repeating, Shuffled, RootOwned, Borrowing, Tied, Remembering, Attending, Encoding, Normed,
         Recurrent, Nested]  # fmt: skip


def make(kind: type[Network]) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().eval()


def passes(network: Network, count: int) -> list[torch.Tensor]:
    inputs = torch.randn(count, 3, WIDTH, generator=torch.Generator().manual_seed(2))
    return [network(x) for x in inputs]


def assert_all_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * len(first)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("granularity", ["layer", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_may_do_anything(kind: type[Network], granularity: str, mode: Callable[[], Any], place: str) -> None:
    network, other = make(kind), make(kind)
    device, store = place.split("-")
    chosen = {"placement": "stream", "granularity": granularity, "offload_to": store}
    fitted = fit(network, plan={"components": {"model": chosen}}, device=device)
    for how in (mode, torch.no_grad):
        with how():
            assert_all_equal(passes(network, 4), passes(other, 4))
    fitted.undo()
    with mode():
        assert_all_equal(passes(network, 2), passes(other, 2))
    assert fitted.live().weights == 0
    state, wanted = network.state_dict(), other.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)


def test_layers_that_are_loaded_because_other_modules_read_their_weights_are_told() -> None:
    network = make(Attending)
    fitted = fit(network, plan={"components": {"model": {"placement": "stream"}}}, device="loopback")
    with torch.no_grad():
        passes(network, 4)  # the first ones have an order to learn
    trace = fitted.report().trace
    fitted.undo()
    assert [phase.on_demand for phase in trace.phases] == [2]
    assert trace.notes == ("denoise: 2 layers were loaded because other modules read their weights",)


@pytest.mark.parametrize("kind", [Shuffled, Borrowing, Tied])
def test_gradients_of_a_streamed_network_reach_its_input(kind: type[Network], place: str) -> None:
    gradients = []
    for network in (make(kind).requires_grad_(False), make(kind).requires_grad_(False)):
        if gradients:
            device, store = place.split("-")
            fit(network, plan={"components": {"model": {"placement": "offload", "offload_to": store}}}, device=device)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
        network(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", [Shuffled, Borrowing, Tied, Remembering])
def test_a_copy_between_calls_is_right_or_refused(kind: type[Network], place: str) -> None:
    network, other = make(kind), make(kind)
    device, store = place.split("-")
    fitted = fit(network, plan={"components": {"model": {"placement": "stream", "offload_to": store}}}, device=device)
    with torch.no_grad():
        assert_all_equal(passes(network, 2), passes(other, 2))
        try:
            twin = copy.deepcopy(network)
        except RunError:
            twin = None
        if twin is not None:
            assert_all_equal(passes(twin, 3), passes(copy.deepcopy(other), 3))
            del twin
            gc.collect()
        assert_all_equal(passes(network, 2), passes(other, 2))
        fitted.undo()
        assert_all_equal(passes(network, 2), passes(other, 2))


def test_a_state_dict_holds_the_weights(place: str, tmp_path: Path) -> None:
    pipe, plain = SD.make(), SD.make()
    fitted = follow(pipe, place)
    run(pipe, SD)
    for name, part in find_components(plain).items():
        state, wanted = getattr(pipe, name).state_dict(), part.state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in wanted)
    torch.save(pipe.unet.state_dict(), tmp_path / "state.pt")
    fitted.undo()
    plain.unet.load_state_dict({key: value.zero_() for key, value in plain.unet.state_dict().items()})
    plain.unet.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(run(plain, SD), untouched(SD.name))


def test_what_is_saved_is_what_was_loaded(place: str, tmp_path: Path) -> None:
    pipe = SD.make()
    fitted = follow(pipe, place)
    run(pipe, SD)
    pipe.save_pretrained(tmp_path / "one")
    pipe.unet.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert torch.equal(run(pipe, SD), untouched(SD.name))
    fitted.undo()
    assert torch.equal(run(pipe, SD), untouched(SD.name))
    read = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "one")
    read.set_progress_bar_config(disable=True)
    assert torch.equal(run(read, SD), untouched(SD.name))
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    read.unet = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "shards")
    assert torch.equal(run(read, SD), untouched(SD.name))


# what people do to pipelines


@functools.lru_cache
def lora() -> dict[str, torch.Tensor]:
    """A LoRA for the UNet that visibly changes the picture, as a state dict."""
    pipe: Any = SD.make()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        targets = ["to_q", "to_v", "conv1", "ff.net.0.proj"]
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), "made")
    state = get_peft_model_state_dict(pipe.unet, adapter_name="made")
    return {f"unet.{key}": value.clone() for key, value in state.items()}


LORA_STEPS: dict[str, Callable[[Any], object]] = {
    "loaded": lambda pipe: pipe.load_lora_weights(dict(lora()), adapter_name="made"),
    "weaker": lambda pipe: pipe.set_adapters("made", 0.5),
    "off": lambda pipe: pipe.disable_lora(),
    "on": lambda pipe: pipe.enable_lora(),
    "fused": lambda pipe: pipe.fuse_lora(),
    "unfused": lambda pipe: pipe.unfuse_lora(),
    "unloaded": lambda pipe: pipe.unload_lora_weights(),
}


@functools.lru_cache
def with_lora() -> dict[str, torch.Tensor]:
    pipe, pictures = SD.make(), {}
    for name, step in LORA_STEPS.items():
        step(pipe)
        pictures[name] = run(pipe, SD)
    return pictures


def test_the_lora_is_seen() -> None:
    pictures = with_lora()
    assert relative_error(pictures["loaded"], untouched(SD.name)) > 1e-2
    assert relative_error(pictures["fused"], pictures["loaded"]) > 1e-2
    assert relative_error(pictures["fused"], pictures["on"]) < FUSED
    assert torch.equal(pictures["off"], untouched(SD.name))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("last", ["loaded", "off", "fused", "unloaded"])
def test_loras_come_and_go(last: str, place: str) -> None:
    pipe = SD.make()
    fitted = follow(pipe, place)
    rest = fitted.live().weights
    run(pipe, SD)
    for name, step in LORA_STEPS.items():
        step(pipe)
        tolerance = FUSED if name in ("fused", "unfused", "unloaded") else 0
        assert relative_error(run(pipe, SD), with_lora()[name]) <= tolerance, name
        if name == last:
            break
    assert abs(fitted.live().weights - rest) <= sum(value.nbytes for value in lora().values())
    fitted.undo()
    assert relative_error(run(pipe, SD), with_lora()[last]) <= tolerance


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", ["offload", "stream"])
def test_a_lora_fused_in_a_callback(placement: str, place: str) -> None:
    def draw(pipe: Any) -> torch.Tensor:
        def fuse(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
            if step == 0:
                pipe.fuse_lora(lora_scale=0.5)
            return {}

        pictures: torch.Tensor = pipe(**SD.call(), callback_on_step_end=fuse)[0]
        return pictures

    pipe, plain = SD.make(), SD.make()
    device, store = place.split("-")
    fitted = fit(pipe, plan={"components": {"unet": {"placement": placement, "offload_to": store}}}, device=device)
    for each in (pipe, plain):
        each.load_lora_weights(dict(lora()))
    assert relative_error(draw(pipe), draw(plain)) <= FUSED
    wanted = run(plain, SD)
    assert relative_error(wanted, with_lora()["loaded"]) > 1e-2
    assert [relative_error(run(pipe, SD), wanted) <= FUSED for _ in range(2)] == [True, True]
    fitted.undo()
    assert relative_error(run(pipe, SD), wanted) <= FUSED


def ip_adapter(unet: Any) -> dict[str, dict[str, torch.Tensor]]:
    """An IP-Adapter for `unet`, in the format of its files."""
    seeded = torch.Generator().manual_seed(4)

    def some(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=seeded)

    context, embedding, tokens = unet.config.cross_attention_dim, 16, 4
    layers, key = {}, 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            owner = unet.get_submodule(name.removesuffix(".processor"))
            for which in ("to_k_ip", "to_v_ip"):
                layers[f"{key}.{which}.weight"] = some(*owner.to_k.weight.shape)
            key += 2
    projection = {
        "proj.weight": some(tokens * context, embedding),
        "proj.bias": some(tokens * context),
        "norm.weight": torch.ones(context),
        "norm.bias": some(context),
    }
    return {"image_proj": projection, "ip_adapter": layers}


def test_an_ip_adapter_comes_and_goes(place: str) -> None:
    embeds = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(5))  # without and with the picture
    pipe, plain = SD.make(), SD.make()
    fitted = follow(pipe, place)
    run(pipe, SD)

    def load(which: Any) -> None:
        which.load_ip_adapter(ip_adapter(which.unet), subfolder="", weight_name="", image_encoder_folder=None)
        which.set_ip_adapter_scale(0.7)

    def draw(which: Any) -> torch.Tensor:
        pictures: torch.Tensor = which(**SD.call(), ip_adapter_image_embeds=[embeds.unsqueeze(1)])[0]
        return pictures

    load(plain)
    wanted = draw(plain)
    assert relative_error(wanted, untouched(SD.name)) > 1e-2
    load(pipe)
    assert torch.equal(draw(pipe), wanted)
    assert torch.equal(draw(pipe), wanted)
    pipe.unload_ip_adapter()
    assert torch.equal(run(pipe, SD), untouched(SD.name))
    load(pipe)
    fitted.undo()
    assert torch.equal(draw(pipe), wanted)


SHARING: dict[str, Callable[[Any], Any]] = {
    "made of them": lambda pipe: diffusers.StableDiffusionImg2ImgPipeline(
        **pipe.components, requires_safety_checker=False
    ),
    "automatic": lambda pipe: diffusers.AutoPipelineForImage2Image.from_pipe(pipe),  # noqa: PLW0108 - not imported before it is needed
    "from_pipe": diffusers.StableDiffusionImg2ImgPipeline.from_pipe,
    "from_pipe, given them": lambda pipe: diffusers.StableDiffusionImg2ImgPipeline.from_pipe(
        pipe, unet=pipe.unet, vae=pipe.vae
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # in what AutoPipeline imports
@pytest.mark.parametrize("share", SHARING.values(), ids=SHARING)
def test_two_pipelines_share_their_parts(share: Callable[[Any], Any], place: str) -> None:
    pipe = SD.make()
    fitted = follow(pipe, place)
    other = share(pipe)
    assert other.unet is pipe.unet
    other.set_progress_bar_config(disable=True)
    rest = fitted.live().weights
    for _ in range(2):
        assert torch.equal(run(other, IMG2IMG), untouched(IMG2IMG.name))
        assert torch.equal(run(pipe, SD), untouched(SD.name))
        assert fitted.live().weights == rest
    fitted.undo()
    assert fitted.live().weights == 0
    assert torch.equal(run(other, IMG2IMG), untouched(IMG2IMG.name))
    assert torch.equal(run(pipe, SD), untouched(SD.name))


# calls that do not come to their end


def live_storages() -> int:
    """Bytes of all storages that tensors in Python hold."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of a wrapper, which has none
                storage = each.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class Stop(Exception):
    pass


def stop_in_callback(pipe: Any, case: TinyCase, error: type[BaseException]) -> None:
    def stop(*_: Any) -> dict[str, Any]:
        raise error

    pipe(**case.call(), callback_on_step_end=stop)


def stop_in_block(pipe: Any, case: TinyCase, error: type[BaseException]) -> None:
    network = next(part for name, part in find_components(pipe).items() if find_role(name, part) == "denoiser")
    layers = [part for part in network.modules() if isinstance(part, nn.Linear)]
    calls = []

    def stop(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise error

    for register in ("register_forward_pre_hook", "register_forward_hook"):
        calls.clear()
        handle = getattr(layers[len(layers) // 2], register)(stop)
        try:
            run(pipe, case)
        except error:
            if register == "register_forward_hook":
                raise
        finally:
            handle.remove()


def stop_in_decoder(pipe: Any, case: TinyCase, error: type[BaseException]) -> None:
    def stop(*_: Any) -> None:
        raise error

    handle = pipe.vae.decoder.conv_out.register_forward_pre_hook(stop)
    try:
        run(pipe, case)
    finally:
        handle.remove()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("error", [Stop, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop", [stop_in_callback, stop_in_block, stop_in_decoder])
@pytest.mark.parametrize("case", [SD, WAN], ids=lambda case: case.name)
def test_a_call_that_fails_leaves_nothing(
    case: TinyCase, stop: Callable[..., None], error: type[BaseException], place: str
) -> None:
    wanted = untouched(case.name)
    pipe = case.make()
    fitted = follow(pipe, place)
    assert torch.equal(run(pipe, case), wanted)
    rest, bytes_before = fitted.live().weights, live_storages()
    for _ in range(3):
        with pytest.raises(error):
            stop(pipe, case, error)
        assert fitted.live().weights == rest
    if case is SD:  # Wan's autoencoder keeps what it has seen
        assert abs(live_storages() - bytes_before) < 20_000
    assert torch.equal(run(pipe, case), wanted)
    assert abs(live_storages() - bytes_before) < 20_000
    fitted.undo()
    assert torch.equal(run(pipe, case), wanted)


@pytest.mark.parametrize("case", [SD, WAN], ids=lambda case: case.name)
def test_an_interrupted_loop_gives_what_it_would(case: TinyCase, place: str) -> None:
    def draw(pipe: Any) -> torch.Tensor:
        def interrupt(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
            pipe._interrupt = step == 0
            return {}

        pictures: torch.Tensor = pipe(**case.call(), callback_on_step_end=interrupt)[0]
        return pictures

    pipe, plain = case.make(), case.make()
    wanted = draw(plain)
    assert not torch.equal(wanted, untouched(case.name))
    fitted = follow(pipe, place)
    rest = fitted.live().weights
    assert torch.equal(draw(pipe), wanted)
    assert fitted.live().weights == rest
    assert torch.equal(run(pipe, case), untouched(case.name))


def test_two_threads_call_at_once(place: str) -> None:
    pipe = SD.make()
    fitted = follow(pipe, place)
    rest = fitted.live().weights
    pictures: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    start = threading.Barrier(2)

    def draw(seed: int) -> None:
        start.wait()
        for _ in range(3):
            pictures[seed].append(pipe(**SD.call() | {"generator": torch.Generator().manual_seed(seed)})[0])

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in pictures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, drawn in pictures.items():
        wanted = SD.make()(**SD.call() | {"generator": torch.Generator().manual_seed(seed)})[0]
        assert_all_equal(drawn, [wanted] * 3)
    assert not torch.equal(pictures[1][0], pictures[2][0])
    assert fitted.live().weights == rest


@contextlib.contextmanager
def default_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where a shell in the background has switched that off."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def interrupted(work: Callable[[], object], seconds: float) -> KeyboardInterrupt | None:
    """Does `work`, with a SIGINT after `seconds`; the interruption, unless the work was done before."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    recorded = torch.is_grad_enabled()
    try:
        timer.start()
        work()
        timer.cancel()
        timer.join()
    except KeyboardInterrupt as error:
        return error
    finally:
        torch.set_grad_enabled(recorded)  # torch.no_grad leaves gradients off if it is interrupted while it ends
    return None


def while_clearing(error: BaseException) -> bool:
    """Whether the interruption came while the call was being cleared up: then the next call goes on with that."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [(Path(code.co_filename).name, code.co_name) for code in frames if "/tightfit/" in code.co_filename]
    return ("session.py", "_clear") in ours or ours[-1:] == [("session.py", "call")]


def interrupt_often(place: str, times: int) -> None:
    """Until `times` interruptions have come."""
    pipe: Any = SD.make()
    fitted = follow(pipe, place, count_activations=False)
    wanted = untouched(SD.name)
    assert torch.equal(run(pipe, SD), wanted)
    rest, seconds = fitted.live().weights, fitted.report().trace.seconds
    moments, count = random.Random(times), 0
    with default_interrupts():
        for _ in range(10 * times):
            if count == times:
                break
            error = interrupted(lambda: run(pipe, SD), 1.1 * seconds * moments.random())
            if error is None:  # too late; beside other work some runs take much longer than others
                seconds = min(seconds, fitted.report().trace.seconds)
                continue
            count += 1
            if while_clearing(error):
                run(pipe, SD)
            assert fitted.live().weights == rest
            assert not fitted.recorder.running
            if count % 10 == 0:
                assert torch.equal(run(pipe, SD), wanted)
                assert fitted.live().weights == rest
    assert count == times
    fitted.undo()
    assert torch.equal(run(pipe, SD), wanted)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come in a destructor
def test_interrupted_at_random(place: str) -> None:
    interrupt_often(place, 20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_at_random_many_times(place: str) -> None:
    interrupt_often(place, 200)


# an interruption at every moment


class Toy:
    """As small as pipelines get: an encoder, a denoiser that works three times, a decoder."""

    def __init__(self) -> None:
        self.components = {"text_encoder": make(Network), "denoiser": make(Skipping), "last": make(RootOwned)}

    def __call__(self) -> torch.Tensor:
        self.components["denoiser"].passes = 0
        with torch.no_grad():
            x = self.components["text_encoder"](torch.ones(2, WIDTH))
            for _ in range(3):
                x = x + self.components["denoiser"](x)
            pictures: torch.Tensor = self.components["last"](x)
        return pictures


class Interrupting:
    """Raises KeyboardInterrupt at a moment in tightfit's own code when Python would: as a function begins, or one
    of C has ended. Without a number, it notes all those moments."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.moments = number, []
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and "/tightfit/" in (code := frame.f_code).co_filename:
            moment = f"{Path(code.co_filename).stem}.{code.co_name}:{frame.f_lineno} {event}"
            self.moments.append(moment)
            if len(self.moments) - 1 == self.number:
                sys.setprofile(None)
                self.where = moment
                raise KeyboardInterrupt

    def __enter__(self) -> Interrupting:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def interrupt_everywhere(place: str, one_in: int) -> None:
    """At the first and the last time that each moment comes, or at one in so many of those."""
    plain = Toy()
    wanted = plain()
    device, store = place.split("-")
    kinds = {"text_encoder": "offload", "denoiser": "stream", "last": "offload"}
    plan = {"components": {name: {"placement": kind, "offload_to": store} for name, kind in kinds.items()}}

    def fitted_toy() -> tuple[Toy, Fitted]:
        pipe = Toy()
        fitted = fit(pipe, plan=plan, device=device, count_activations=False)
        assert torch.equal(pipe(), wanted)
        return pipe, fitted

    pipe, fitted = fitted_toy()
    rest = fitted.live().weights
    with Interrupting() as noted:
        assert torch.equal(pipe(), wanted)
    failed = []
    for number in enumerate_once(noted.moments)[random.Random(one_in).randrange(one_in) :: one_in]:
        wrong = interrupt_at(number, pipe, fitted, rest, wanted)
        if wrong is not None:
            failed.append(wrong)
            pipe, fitted = fitted_toy()
    assert not failed, "\n".join(failed)
    fitted.undo()
    assert torch.equal(pipe(), wanted)


def interrupt_at(number: int, pipe: Toy, fitted: Fitted, rest: int, wanted: torch.Tensor) -> str | None:
    """What is wrong after an interruption at that moment."""
    interrupting, step = Interrupting(number), "the interrupted call"
    try:
        try:
            with interrupting:
                pipe()
        except KeyboardInterrupt as error:
            left = fitted.live().weights - rest
            if left and not while_clearing(error):
                return f"{interrupting.where}: {left} bytes are left"
        step = "the next call"
        same = torch.equal(pipe(), wanted)
    except Exception as error:
        return f"{interrupting.where}: {error!r} in {step}"
    left = fitted.live().weights - rest
    if same and not left and not fitted.recorder.running:
        return None
    return f"{interrupting.where}: after the next call {left} bytes are left, the result is {same}"


def enumerate_once(moments: list[str]) -> list[int]:
    """Where each moment is first and last."""
    first = {moment: index for index, moment in reversed(list(enumerate(moments)))}
    last = {moment: index for index, moment in enumerate(moments)}
    return sorted({*first.values(), *last.values()})


@pytest.mark.one_in(3)
def test_interrupted_at_some_moments(place: str) -> None:
    interrupt_everywhere(place, 10)


@pytest.mark.slow
def test_interrupted_at_every_moment(place: str) -> None:
    interrupt_everywhere(place, 1)
