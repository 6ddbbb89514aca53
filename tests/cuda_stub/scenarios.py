"""Situations in which waits of `devices/` and `apply/` matter: small networks first, tiny pipelines after them.

Each computes something under a plan, the same each time, and undoes the plan.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import torch
from diffusers import DiffusionPipeline
from diffusers.models.attention import FeedForward
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from cuda_stub import driver
from tightfit.apply.activations.activation_offload import offload_waiting_activations
from tightfit.apply.weights import pinned_staging as staging
from tightfit.devices.cuda import CudaDevice
from tightfit.measure.modules import find_components
from tightfit.measure.recorder import Recorder
from tightfit.plan import component_cost as parts
from tightfit.run.call_arguments import request_of
from tiny_autoencoders import CASES as AUTOENCODERS
from tiny_pipelines import CASES, run

__all__ = ["SCENARIOS", "begin_peak", "peak", "use_free_memory"]

MIB = 2**20
WIDTH = 128
FOR_EVER = 10**6
Made = list[torch.Tensor]


_peaks: list[int] = []  # before others wrote into what was free


def begin_peak() -> None:
    """From now on `peak` is counted."""
    _peaks.clear()
    torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    """The most bytes that were allocated since `begin_peak`, by anybody but `use_free_memory`."""
    return max(*_peaks, torch.cuda.max_memory_allocated(), 0)


def use_free_memory() -> None:
    """The card writes into all memory that the allocator has for this stream and nobody holds, as others may."""
    _peaks.append(torch.cuda.max_memory_allocated())
    stream, held = torch.cuda.current_stream().cuda_stream, []
    sizes = [
        (segment["segment_type"], block["size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if segment["stream"] == stream and block["state"] == "inactive"
    ]
    for kind, size in sorted(sizes, reverse=True):
        if (kind == "small") == (size <= MIB):  # otherwise it would be taken from elsewhere
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1))
    del held
    torch.cuda.reset_peak_memory_stats()


class _Interruption(Exception):
    pass


class _Interrupting(TorchDispatchMode):
    """Raises `error` instead of the n-th operation `name`."""

    def __init__(self, name: str, number: int, error: type[BaseException] = _Interruption) -> None:
        super().__init__()
        self._name, self._left, self._error = name, number, error

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name.partition("::")[2] == self._name:
            self._left -= 1
            if self._left == 0:
                raise self._error
        return function(*args, **kwargs or {})


@contextmanager
def _interrupted(name: str, number: int, error: type[BaseException] = _Interruption) -> Iterator[None]:
    with suppress(error), _Interrupting(name, number, error):
        yield
        raise AssertionError("nothing was interrupted")


# ---- networks


class _Layers(nn.Module):
    """Linear layers in the order that `order` says."""

    def __init__(self, count: int, order: list[int] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.order = order or list(range(count))
        self.requires_grad_(False)
        self.before_each: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            self.before_each()
            x = self.blocks[index](x) + x
        return x


class _Pipeline(DiffusionPipeline):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.register_modules(network=network)

    def __call__(self, x: torch.Tensor) -> Made:
        made = [self.network(x)]
        torch.cuda.synchronize()
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                made.append(self.network(x))
        torch.cuda.synchronize()
        return made


LAYER = -(-(WIDTH * WIDTH + WIDTH) * 4 // 4096) * 4096 + 4096  # bytes that a layer takes of a ring


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (8, WIDTH)), generator=torch.Generator().manual_seed(1)).to("cuda")


def _fitted(model: nn.Module, plan: Mapping[str, Any]) -> tightfit.Fitted:
    return tightfit.fit(model, plan={"components": {"model": dict(plan)}}, device="cuda")


def streamed_layers() -> Made:
    """Layers through a small ring, pass after pass."""
    model = _Layers(5)
    fitted = _fitted(model, {"placement": "stream", "ring_buffer": 3 * LAYER, "resident_layers": ["blocks.1"]})
    made = [model(_x()), model(_x()), model(_x(4, WIDTH))]
    fitted.undo()
    return made


def _gradient(model: nn.Module, x: torch.Tensor, number: int = 0) -> torch.Tensor:
    """The gradient of `x`; with a `number`, of a backward pass that is left at its n-th product, and then another."""
    with torch.enable_grad():
        x = x.requires_grad_()
        loss = model(x).square().mean()
        with _interrupted("mm", number) if number else nullcontext():
            loss.backward()
    use_free_memory()
    assert number or x.grad is not None
    return _gradient(model, x.detach().clone()) if number else x.grad  # type: ignore[return-value]


def _differentiated(chosen: dict[str, Any]) -> Made:
    """Backward passes, of which some are interrupted, with what is free in use by others after each."""
    model = _Layers(6)
    fitted = _fitted(model, {"placement": "stream", "ring_buffer": 3 * LAYER, "resident_layers": [], **chosen})
    made = [_gradient(model, _x(), number) for number in (0, 0, 2, 0, 3)]
    made += [model(_x()), _gradient(model, _x(4, WIDTH))]
    for model.order in ([3, 1, 4, 0, 2, 5], [0, 5, 1, 4], [2, 3, 2, 0]):  # what was expected is given up on its way
        made.append(_gradient(model, _x()))
    fitted.undo()
    return made


def gradients() -> Made:
    return _differentiated({"gradient_checkpointing": False})


def gradients_of_blocks() -> Made:
    return _differentiated({"gradient_checkpointing": True})


class _Unlike(_Layers):
    """Layers of several sizes; after each backward pass of one, others use the memory that is free then."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks.extend(nn.Linear(WIDTH, size * WIDTH) for size in sizes)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x).unflatten(1, (-1, WIDTH)).sum(1) + x
            x.register_hook(lambda _: use_free_memory())
        return x


def gradients_of_fewer_layers() -> Made:
    """A layer is left out while it is on its way, and gives way to a later one, which gets other memory."""
    model = _Unlike(1, 1, 1, 3, 2, 4)
    plan = {"placement": "stream", "ring_buffer": 10 * LAYER, "resident_layers": [], "gradient_checkpointing": False}
    fitted = _fitted(model, plan)
    made = []
    for model.order in ([5, 4, 1, 3, 2, 1, 0], [5, 4, 1, 2, 1, 0]):  # of the backward pass: the reverse
        made += [_gradient(model, _x()), _gradient(model, _x())]
    fitted.undo()
    return made


def _staged(chosen: dict[str, Any], faults: dict[str, int]) -> Made:
    """Through a buffer that is filled and sent by a thread, and holds a few layers; some passes are interrupted."""
    model = _Layers(8)
    for layer in model.blocks:  # at an address at which it is sent by itself, when it has come from the disk
        bias = torch.empty(WIDTH + 4)[4:].copy_(layer.bias)
        layer.bias = nn.Parameter(bias, requires_grad=False)
    plan = {"placement": "stream", "ring_buffer": 3 * LAYER, "resident_layers": ["blocks.1"], **chosen}
    with driver.faults(**faults) if faults else nullcontext(), patch.object(staging, "SIZE", 2 * LAYER):
        fitted = _fitted(model, plan)
        made = [model(_x()), model(_x())]
        for number in (1, 5):
            with _interrupted("addmm", number):
                model(_x())
            use_free_memory()
            made.append(model(_x(4, WIDTH)))
        fitted.undo()
    return made


def not_page_locked() -> Made:
    return _staged({"pinned": False}, {})


def page_locks_refused() -> Made:
    return _staged({}, {"fail_register": 1, "fail_register_times": FOR_EVER})


def on_disk() -> Made:
    return _staged({"offload_to": "disk"}, {})


def two_streams() -> Made:
    """Passes on streams that nobody orders; the layer that ends one begins the next, so it is not given back between.

    All in one call: a call ends with a wait, to tell how long it took.
    """
    model = _Layers(3, [0, 1, 2, 0])
    plan = {"placement": "stream", "ring_buffer": 3 * LAYER, "resident_layers": []}
    pipe = _Pipeline(model)
    fitted = tightfit.fit(pipe, plan={"components": {"network": plan}}, device="cuda")
    made = pipe(_x())
    fitted.undo()
    return made


def looked_at() -> Made:
    """Weights in files that code looks at while no layer is about to run, and while some are on their way."""
    model = _Layers(6)
    fitted = _fitted(
        model, {"placement": "stream", "offload_to": "disk", "ring_buffer": 3 * LAYER, "resident_layers": []}
    )
    made = [model(_x())]
    for number in (5, 4, 3, 0, 1):
        use_free_memory()
        made.append(model.blocks[number].weight.detach() + 0)

    def look() -> None:
        made.extend(
            model.blocks[number].weight.detach() + 0 for number in (2, 3, 1, 0, 4, 5)
        )  # first what is under way

    handle = model.blocks[1].register_forward_pre_hook(lambda *_: look())
    made.append(model(_x()))
    handle.remove()
    fitted.undo()
    return made


class _FeedForwards(nn.Module):
    """Blocks of which each needs two layers at once."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(FeedForward(WIDTH)) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            use_free_memory()
            x = x + block(x)
        return x


def more_than_the_ring() -> Made:
    """More layers are in use at once than the ring was made for: the others have memory of their own."""
    model = _FeedForwards()
    largest = max(parameter.nbytes for parameter in model.parameters()) + 2 * 4096
    plan = {
        "placement": "stream",
        "granularity": "layer",
        "ring_buffer": largest,
        "resident_layers": [],
        "ffn_chunk": "1MB",
    }
    fitted = _fitted(model, plan)
    made = [model(_x()), model(_x())]
    fitted.undo()
    return made


def memory_runs_out() -> Made:
    """A block runs out of memory while what stays is on its way: that gives up its memory, which is used at once."""
    model = _Layers(8)
    resident = [f"blocks.{number}" for number in range(8)]
    with patch.object(parts, "CHUNK", 2 * LAYER):
        fitted = _fitted(model, {"placement": "stream", "ring_buffer": LAYER, "resident_layers": resident})
        made = []
        for _ in range(2):
            fails = [torch.OutOfMemoryError("out of memory")]

            def work(_: nn.Module, given: Any, fails: list[Exception] = fails) -> None:
                use_free_memory()
                if fails:
                    raise fails.pop()

            handle = model.blocks[0].register_forward_pre_hook(work)
            made.append(model(_x()))
            handle.remove()
        fitted.undo()
    return made


class _UShape(nn.Module):
    """What the first blocks make is wanted by the last ones, and some of it at once, beside its block."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(2 * count))
        self.count = count
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.blocks[: self.count]:
            x = block(x)
            kept.append(x)
        y = self.blocks[self.count](x * 2)  # x goes while this works, and is wanted as soon as it is done
        x = x + y
        for block in self.blocks[self.count + 1 :]:
            x = block(x + kept.pop())
        return x


def _waiting(rows: int, interrupted: bool = False, **faults: int) -> Made:
    model, device = _UShape().to("cuda"), CudaDevice()
    with driver.faults(**faults) if faults else nullcontext(), ExitStack() as undo:
        offload_waiting_activations(model, device, Recorder(device), undo)
        made = [model(_x(rows, WIDTH)), model(_x(rows, WIDTH))]
        for number in (8, 6, 7) if interrupted else ():  # what comes back is on its way
            with _interrupted("addmm", number, KeyboardInterrupt):  # after which torch calls no hooks
                model(_x(rows, WIDTH))
            use_free_memory()
            if number != 7:
                made.append(model(_x(rows, WIDTH)))
    gc.collect()  # what was under way when it was undone
    use_free_memory()
    return made


def waiting() -> Made:
    return _waiting(64)


def much_waiting() -> Made:
    """Large enough that what is not freed in time shows in the peak."""
    return _waiting(8192)


def waiting_interrupted() -> Made:
    return _waiting(64, interrupted=True)


def waiting_interrupted_refused() -> Made:
    return _waiting(64, interrupted=True, fail_register=1, fail_register_times=FOR_EVER)


def _decoding(rows: int, strips: int, interruptions: tuple[int, ...] = (), columns: int = 5) -> Made:
    case = next(case for case in AUTOENCODERS if case.name == "AutoencoderKL without attention")
    model: Any = case.make().eval()
    fitted = tightfit.fit(model, plan={"vae": {"strips": strips, "feature_maps": "host"}}, device="cuda")
    latents = case.latents(rows, 1, columns).to("cuda")
    made = [model.decode(latents).sample for _ in range(1)]
    for number in interruptions:
        with _interrupted("convolution", number):
            model.decode(latents)
        use_free_memory()
        made.append(model.decode(latents).sample)
    fitted.undo()
    return made


def narrow_strips() -> Made:
    """In strips so narrow that nothing goes ahead."""
    return _decoding(4, 1, columns=512)


def many_maps_waiting() -> Made:
    return _decoding(64, 300_000)


def maps_interrupted() -> Made:
    return _decoding(4, 30_000, (20, 40))


NETWORKS: dict[str, Callable[[], Made]] = {
    function.__name__.replace("_", " "): function
    for function in (
        streamed_layers,
        gradients,
        gradients_of_blocks,
        gradients_of_fewer_layers,
        not_page_locked,
        page_locks_refused,
        on_disk,
        two_streams,
        looked_at,
        more_than_the_ring,
        memory_runs_out,
        waiting,
        much_waiting,
        waiting_interrupted,
        waiting_interrupted_refused,
        narrow_strips,
        many_maps_waiting,
        maps_interrupted,
    )
}


# ---- pipelines

ON_DISK = {"offload_to": "disk", "placement": "stream"}


def _case(name: str) -> Any:
    return next(case for case in CASES if case.name == name)


@contextmanager
def _interrupting(network: nn.Module) -> Iterator[None]:
    """What computes last in `network`'s middle is left with an exception."""
    layers = [module for module in network.modules() if not list(module.children()) and list(module.parameters())]

    def interrupt(*_: Any) -> None:
        raise _Interruption

    hook = layers[len(layers) // 2].register_forward_hook(interrupt)
    try:
        yield
    finally:
        hook.remove()


def streamed_interrupted() -> Made:
    """Calls of a pipeline that end in the middle of each of its networks, the last one before `undo`."""
    case = _case("Flux")
    pipe = case.make()
    fitted = tightfit.fit(pipe, plan={"level": 3, "vae": {"slicing": False}}, device="cuda")
    for network in (pipe.vae.decoder, pipe.transformer, pipe.text_encoder):
        with suppress(_Interruption), _interrupting(network):
            run(pipe, case)
    made = [run(pipe, case)]
    with suppress(_Interruption), _interrupting(pipe.text_encoder):
        run(pipe, case)
    fitted.undo()
    return made


def from_a_folder() -> Made:
    """Read from the files that it was saved in, where weights lie as they happen to: each is sent in several pieces."""
    case = _case("Flux")
    with tempfile.TemporaryDirectory() as folder, patch.object(staging, "SIZE", 64 * 1024):
        case.make().save_pretrained(folder)
        plan = {"components": dict.fromkeys(find_components(case.make()), ON_DISK)}
        loaded = tightfit.load(folder, plan=plan, device="cuda")
        pipe = loaded.pipe
        made = [run(pipe, case)]
        with suppress(_Interruption), _interrupting(find_components(pipe)["transformer"]):
            run(pipe, case)
        use_free_memory()
        made.append(run(pipe, case))
        loaded.fitted.undo()
    return made


def begun_again() -> Made:
    """Memory runs out at the end of a call: what its networks gave is given back once more."""
    case = _case("Flux")
    pipe = case.make()
    chosen = {"budget": 512 * MIB, "request": request_of(pipe, (), case.call())}
    fitted = tightfit.fit(pipe, **chosen, device="cuda")
    made = [run(pipe, case)]
    fails = [torch.OutOfMemoryError("out of memory")]

    def fail(*_: Any) -> None:
        use_free_memory()
        if fails:
            raise fails.pop()

    handle = pipe.vae.decoder.register_forward_pre_hook(fail)
    made.append(run(pipe, case))
    handle.remove()
    fitted.undo()
    return made


def _cached(cache: dict[str, Any], interrupted: tuple[int, ...] = ()) -> Made:
    """Steps are skipped by what is kept in host memory; some calls end at their n-th product."""
    case = _case("Flux")
    pipe = case.make()
    denoiser = {"cache": cache | {"keep_on": "host"}, "placement": "stream", "weight_memory": "100KB"}
    fitted = tightfit.fit(pipe, plan={"components": {"transformer": denoiser}}, device="cuda")

    def call() -> Made:
        """The picture, and how many bytes are allocated after each step."""
        begin, allocated = torch.cuda.memory_allocated(), []

        def note(_pipe: Any, _step: int, _timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
            allocated.append(torch.cuda.memory_allocated() - begin)
            return given

        settings = {"num_inference_steps": 6, "callback_on_step_end": note}
        (picture,) = pipe(
            **case.call(64) | settings | {"generator": torch.Generator().manual_seed(0)}, return_dict=False
        )
        return [picture, torch.tensor(allocated)]

    made = call()
    for number in interrupted:
        with _interrupted("addmm", number):
            call()
        use_free_memory()
        made += call()
    fitted.undo()
    gc.collect()  # what was under way
    use_free_memory()
    return made


def compared_in_host_memory() -> Made:
    """What is kept comes before it is known whether it is used."""
    return _cached({"strategy": "first-block", "threshold": 0.3}, (100, 200))


def predicted_from_host_memory() -> Made:
    """Differences need what was kept."""
    return _cached({"strategy": "taylorseer", "interval": 2, "warm_up": 2}, (100, 200))


SCENARIOS: dict[str, Callable[[], Made]] = {
    **NETWORKS,
    "streamed, interrupted": streamed_interrupted,
    "from a folder": from_a_folder,
    "begun again": begun_again,
    "compared in host memory": compared_in_host_memory,
    "predicted from host memory": predicted_from_host_memory,
}
