"""Host seconds for each use of a streamed or resident layer, measured with tiny layers."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from contextlib import ExitStack

import torch
from torch import nn

from tightfit.apply.weights.host_store import HostStore
from tightfit.apply.weights.streamer import Streamer
from tightfit.apply.weights.weight_groups import WeightGroup, weight_groups_of
from tightfit.devices.device import Device
from tightfit.measure.modules import inspect_component
from tightfit.measure.recorder import Recorder
from tightfit.plan.timeline import HostOverheads

__all__ = ["layer_overheads"]

LAYERS, PASSES, LEARNING = 64, 12, 3  # LEARNING: first passes, not timed with a streamer
AHEAD = 4  # layers that the ring holds


class _Layer(nn.Module):
    """A layer with as many parameters as most layers have, and no computation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self) -> None:
        pass


def layer_overheads(device: Device, launch_overhead: float) -> HostOverheads:
    """Host seconds per layer in a usual pass, without `launch_overhead`: seconds to launch one layer's copies."""
    network = nn.ModuleList(_Layer() for _ in range(LAYERS))
    groups = weight_groups_of(
        network,
        inspect_component("layers", network),
        "layer",
        lambda source_params: HostStore(source_params, device),
        lambda source_param: source_param,
    )
    with ExitStack() as undo:
        for group in groups:
            group.store.lock_pages()
            undo.callback(group.unlock_pages)
        bare = statistics.median(_pass(network, device) for _ in range(PASSES))
        streamed, resident = (_seconds(network, groups, stays, device) - bare for stays in ((), range(LAYERS)))
    return HostOverheads(max(streamed / LAYERS - launch_overhead, 0.0), max(resident / LAYERS, 0.0))


def _seconds(network: nn.ModuleList, groups: list[WeightGroup], stays: Collection[int], device: Device) -> float:
    """Host seconds of a forward pass, once the order is known and resident layers are loaded."""
    names, recorder = {groups[index].name for index in stays}, Recorder(device, count_activations=False)
    streamer = Streamer(groups, names, AHEAD * groups[0].size, device, recorder)
    with ExitStack() as undo:
        undo.callback(streamer.clear)
        streamer.hook(undo.callback)
        return statistics.median([_pass(network, device, streamer) for _ in range(PASSES)][LEARNING:])


def _pass(network: nn.ModuleList, device: Device, streamer: Streamer | None = None) -> float:
    device.synchronize()
    begun = device.now()
    if streamer is not None:
        streamer.begin()
    for layer in network:
        layer()
    if streamer is not None:
        streamer.end()
    return device.now() - begun
