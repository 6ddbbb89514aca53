"""A checked folder → its pipeline without weights, or with each weight either loaded or left in its file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Set
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.apply.weights.disk_store import read_stored
from tightfit.apply.weights.stores import FileBackedWeights
from tightfit.apply.weights.weight_store import FileTensor
from tightfit.checkpoint.configurations import check_configuration, check_configurations, class_of, making
from tightfit.checkpoint.folder import ComponentFolder, ModelFolder, network_folder
from tightfit.checkpoint.loading import load_pipeline, quietly
from tightfit.checkpoint.tensors import NotLazyLoadable, TensorLocation, locate_weights, read_locations
from tightfit.devices.disk import DiskReader
from tightfit.measure.build_models import build_network

__all__ = ["LazyCheckpoint", "build_component", "build_folder", "build_lazily", "networks_in"]

# a network that makes more tensors than that for each stored one, and these, is not the one that was stored: it may
# have a billion layers
_TIMES_STORED, _MORE = 10, 1000


class LazyCheckpoint:
    """A pipeline or a network whose weights are still in its files."""

    def __init__(
        self, pipe: Any, networks: Mapping[str, nn.Module], places: Mapping[str, dict[str, TensorLocation]]
    ) -> None:
        self.pipe = pipe
        self._networks, self._places = networks, places

    def fill(self, left: Callable[[str, nn.Module], Set[int]]) -> FileBackedWeights:
        """Load all weights but those whose ids `left(name, network)` returns; return the file locations of these.

        ModelError if a file ends too soon, cannot be read, or has changed since its header was read.
        """
        file_weights = FileBackedWeights()
        with DiskReader() as reader:
            for name, places in self._places.items():
                network = self._networks[name]
                unread = left(name, network)
                for weight, place in _weights(network, places).values():
                    strides = _strides(weight.shape)
                    where = FileTensor(place.path, place.offset, place.dtype, weight.shape, strides, place.state)
                    if isinstance(weight, nn.Parameter) and id(weight) in unread:
                        file_weights.put(weight, where)
                    else:
                        _replace(network, weight, read_stored(where, reader).to(weight.dtype))
        return file_weights


def build_lazily(path: Path, folder: ModelFolder | None, dtype: torch.dtype) -> LazyCheckpoint:
    """Build the pipeline of `folder`, or the single diffusers network in `path` (None), to be computed in `dtype`.

    Raises ModelError, naming file and tensor, if the files do not match the networks.
    """
    parts = [_single_network(path)] if folder is None else _networks(folder)
    networks, places = {}, {}
    for part in parts:
        here = path if folder is None else path / part.name
        stored = read_locations(part.weight_files, part.weight_index)
        network = build_component(path, here, part, dtype, len(stored))
        try:
            places[part.name] = locate_weights(network, stored, part.name)
        except NotLazyLoadable:  # only the library's own loader can load it
            with quietly(), making(here / "config.json", part.class_name):
                network = class_of(path, part).from_pretrained(str(here), torch_dtype=dtype, local_files_only=True)
        networks[part.name] = network
    pipe = networks[parts[0].name] if folder is None else load_pipeline(folder, dtype, networks)
    return LazyCheckpoint(pipe, networks, places)


def _networks(folder: ModelFolder) -> list[ComponentFolder]:
    """The components with weights, whose configurations are checked here; a safety checker is left out."""
    with quietly():
        check_configurations(folder)
    return networks_in(folder)


def networks_in(folder: ModelFolder) -> list[ComponentFolder]:
    """Return the components with weights that are loaded: all but a safety checker."""
    return [part for part in folder.components if part.weight_files and "safety" not in part.name]


def _single_network(path: Path) -> ComponentFolder:
    part = network_folder(path)
    check_configuration(path / "config.json", class_of(path, part), part)
    return part


def build_component(root: Path, path: Path, part: ComponentFolder, dtype: torch.dtype, stored: int) -> nn.Module:
    """Build a network as `from_pretrained` does, but without weights, of which its files have `stored` ones.

    ModelError if the configuration makes no network, or one that is not at all like the files.
    """
    kind, most = class_of(root, part), _TIMES_STORED * stored + _MORE
    with quietly(), making(path / "config.json", part.class_name), torch.random.fork_rng(devices=[]):
        if part.library != "transformers":
            config = kind.load_config(str(path), local_files_only=True)
            network = build_network(lambda: kind.from_config(config), dtype, most)
            network.register_to_config(_name_or_path=str(path))  # type: ignore[operator]
            return network
        config = kind.config_class.from_pretrained(str(path), local_files_only=True, dtype=dtype)
        network = build_network(lambda: kind(config), dtype, most)
        config._name_or_path = str(path)
        if (path / "generation_config.json").exists() and hasattr(network, "generation_config"):
            generation = import_module("transformers").GenerationConfig
            network.generation_config = generation.from_pretrained(str(path), local_files_only=True)
    return network


def _weights(
    network: nn.Module, places: Mapping[str, TensorLocation]
) -> dict[int, tuple[torch.Tensor, TensorLocation]]:
    """id → each parameter and buffer stored in a file, once, with its location; in file order."""
    held = network.state_dict(keep_vars=True)
    named = sorted(places, key=lambda name: (str(places[name].path), places[name].offset))
    return {id(held[name]): (held[name], places[name]) for name in named}


def _replace(network: nn.Module, weight: torch.Tensor, value: torch.Tensor) -> None:
    """Replace `weight` by `value` wherever `network` has it."""
    now = nn.Parameter(value, weight.requires_grad) if isinstance(weight, nn.Parameter) else value
    for module in network.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, there in table.items():
                if there is weight:
                    table[name] = now


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def build_folder(folder: ModelFolder, dtype: torch.dtype) -> Any:
    """Build the pipeline of `folder` in `dtype`, with the large tensors of its networks on "meta".

    Raises ModelError as `build_lazily`, for the same files. A safety checker is left out: it needs pixel values.
    """
    networks: dict[str, Any] = {part.name: None for part in folder.components if "safety" in part.name}
    for part in _networks(folder):
        stored = read_locations(part.weight_files, part.weight_index)
        networks[part.name] = build_component(folder.path, folder.path / part.name, part, dtype, len(stored))
        with contextlib.suppress(NotLazyLoadable):
            locate_weights(networks[part.name], stored, part.name)
    return load_pipeline(folder, dtype, networks)
