"""What the host does for each layer whose weights stream, or stay: thread CPU time, with copies that do nothing.

    python bench/host_cost.py [--models sd-1.5,sdxl,flux.1-dev] [--passes 12] [--device loopback|cuda]

Denoisers at full size, as shapes: every layer that owns large weights is called in the order of the model, with a
forward pass that does nothing. What the same calls take without hooks is taken off, so what torch does for a module
with hooks is in it. Lanes send nothing ("loopback"), or go through torch's own streams and events, with one small
buffer in the place of all weights ("cuda": on the stand-in of NVIDIA's libraries the driver's own time is missing, on
a card it is in it). The quickest pass of all counts: a pass of milliseconds on a shared machine is disturbed sooner or
later. Writes bench/results/host-cost-<device>-<label>.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from measuring import write
from tightfit.apply.weights.host_store import HostStore
from tightfit.apply.weights.streamer import Streamer
from tightfit.apply.weights.weight_groups import WeightGroup, weight_groups_of
from tightfit.catalog.known import known_model
from tightfit.devices.choose import choose_device
from tightfit.devices.copy_stream import CopyHandle, CopyStream
from tightfit.devices.device import Device, LoopbackDevice
from tightfit.measure.build_models import build_part
from tightfit.measure.modules import inspect_component
from tightfit.measure.recorder import Recorder

RING = 512 * 2**20


class Nothing(CopyStream):
    """Sends nothing."""

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> CopyHandle:
        return CopyHandle()


class OneSource(CopyStream):
    """Sends the first bytes of one small buffer, whatever it is given."""

    def __init__(self, inner: CopyStream, device: Device) -> None:
        self._inner, self._buffer = inner, device.pinned(512)

    def send(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> CopyHandle:
        return self._inner.send(target[:512], self._buffer, after)

    def mark(self) -> Any:
        return self._inner.mark()


def device_for(name: str) -> Device:
    """The device, whose lanes need no weights."""
    if name == "loopback":
        device: Device = LoopbackDevice()
        device.copy_stream = Nothing  # type: ignore[method-assign]
    else:
        device = choose_device(name)
        stream = device.copy_stream
        device.copy_stream = lambda: OneSource(stream(), device)  # type: ignore[method-assign]
    return device


def denoiser_of(name: str) -> nn.Module:
    """The network of a known model that works in each step, as shapes."""
    parts = known_model(name).components
    which = next(part for part in ("unet", "transformer") if part in parts)
    network: nn.Module = build_part(which, parts[which])
    for each in network.modules():  # those that are small have numbers otherwise
        for table in (each._parameters, each._buffers):
            table.update({key: value if value is None else _shape(value) for key, value in table.items()})  # type: ignore[arg-type]
    return network


def _shape(value: torch.Tensor) -> torch.Tensor:
    meta = value.detach().to("meta")
    return nn.Parameter(meta, requires_grad=False) if isinstance(value, nn.Parameter) else meta


def microseconds(
    network: nn.Module, device: Device, resident: Callable[[list[WeightGroup]], set[str]], passes: int
) -> float:
    """Of the quickest pass, for each layer."""
    groups = weight_groups_of(
        network, inspect_component("denoiser", network), "layer",
        lambda masters: HostStore(list(masters), device), lambda master: master,
    )  # fmt: skip
    recorder, gates = Recorder(device, count_activations=False), [gate for p in groups for gate in p.gates]
    streamer = Streamer(groups, resident(groups), RING, device, recorder)
    with ExitStack() as undo, recorder.call():
        for gate in gates:
            gate.forward = _nothing
            undo.callback(delattr, gate, "forward")
        bare = [_timed(gates) for _ in range(passes)]
        streamer.hook(undo.callback)
        recorder.enter("denoise")
        took = []
        for _ in range(passes):
            took.append(_timed(gates, streamer))
            device.synchronize()
        streamer.clear()
    return (min(took[2:]) - min(bare)) / 1000 / len(gates)


def _timed(gates: list[nn.Module], streamer: Streamer | None = None) -> int:
    """Nanoseconds of a pass that calls all of `gates`."""
    begun = time.thread_time_ns()
    if streamer:
        streamer.begin()
    for gate in gates:
        gate()
    if streamer:
        streamer.end()
    return time.thread_time_ns() - begun


def _nothing() -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="sd-1.5,sdxl,flux.1-dev")
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--device", default="loopback", choices=["loopback", "cuda"])
    parser.add_argument("--label", default="now")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    rows = []
    for name in options.models.split(","):
        network = denoiser_of(name)
        layers = len(inspect_component("denoiser", network).layers)
        device = device_for(options.device)
        streamed = microseconds(network, device, lambda groups: set(), options.passes)
        some = 2**30  # of what stays: more is the same again
        resident = microseconds(_part(network, some), device, lambda groups: {p.name for p in groups}, options.passes)
        row = {
            "model": name, "device": options.device, "version": options.label, "leaves": layers,
            "streamed_us": round(streamed, 2), "resident_us": round(resident, 2),
            "pass_streamed_ms": round(streamed * layers / 1000, 2),
            "pass_resident_ms": round(resident * layers / 1000, 2),
        }  # fmt: skip
        rows.append(row)
        print(row)
    write(f"host-cost-{options.device}-{options.label}", {"passes": options.passes, "rows": rows})


def _part(network: nn.Module, size: int) -> nn.Module:
    """The first layers of `network`, as far as `size` bytes."""
    part, taken = nn.ModuleList(), 0
    for layer in network.modules():
        if not list(layer.children()) and any(p.nbytes >= 2**20 for p in layer.parameters(recurse=False)):
            taken += sum(p.nbytes for p in layer.parameters())
            if taken > size:
                break
            part.append(layer)
    return part


if __name__ == "__main__":
    main()
