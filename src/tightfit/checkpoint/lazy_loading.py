"""A checked folder → its pipeline without weights, or with each weight either loaded or left in its file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.apply.weights.file_backed_weights import FileBackedWeights
from tightfit.apply.weights.weight_store import FileTensor
from tightfit.checkpoint.configurations import check_configuration, check_configurations, class_of, making
from tightfit.checkpoint.folder import ComponentFolder, ModelFolder, network_folder
from tightfit.checkpoint.loading import load_pipeline, quietly
from tightfit.checkpoint.tensor_reads import PendingTensor, TensorReads
from tightfit.checkpoint.tensors import NotLazyLoadable, TensorLocation, locate_weights, read_locations
from tightfit.measure.build_models import build_network

__all__ = ["LazyCheckpoint", "LeftInFiles", "build_component", "build_folder", "build_lazily", "networks_in"]

# a network that makes more tensors than that for each stored one, and these, is not the one that was stored: it may
# have a billion layers
_TIMES_STORED, _MORE = 10, 1000

LeftInFiles = Callable[[str, nn.Module], Set[int]]  # a component → ids of its weights that are not loaded


class LazyCheckpoint(AbstractContextManager["LazyCheckpoint"]):
    """A pipeline or a network whose weights are in its files, or are being read; reading ends with the context."""

    def __init__(self) -> None:
        self.pipe: Any = None
        self._file_weights, self._reads = FileBackedWeights(), TensorReads()
        self._networks: dict[str, nn.Module] = {}
        self._places: dict[str, dict[str, TensorLocation]] = {}  # of components that are not read yet
        self._pending: dict[str, list[tuple[torch.Tensor, PendingTensor]]] = {}

    def add(self, name: str, network: nn.Module, places: dict[str, TensorLocation], left: LeftInFiles | None) -> None:
        """Add a component; start to read its weights where it is known which are `left` in files."""
        self._networks[name], self._places[name] = network, places
        if left is not None:
            self._start(name, left)

    def _start(self, name: str, left: LeftInFiles) -> None:
        """Start to read the weights of a component, but for those that are left in files."""
        network = self._networks[name]
        unread, pending = left(name, network), []
        for weight, place in _weights(network, self._places.pop(name)).values():
            if isinstance(weight, nn.Parameter) and id(weight) in unread:
                strides = _strides(weight.shape)
                self._file_weights.put(
                    weight, FileTensor(place.path, place.offset, place.dtype, weight.shape, strides, place.state)
                )
            else:
                pending.append((weight, PendingTensor(place, weight.dtype)))
        self._pending[name] = pending
        self._reads.start([tensor for _, tensor in pending])

    def fill(self, left: LeftInFiles) -> FileBackedWeights:
        """Load all weights but those whose ids `left(name, network)` returns; return the file locations of these.

        ModelError if a file ends too soon, cannot be read, or has changed since its header was read.
        """
        for name in list(self._places):
            self._start(name, left)
        self._reads.wait()
        for name, pending in self._pending.items():
            _replace(self._networks[name], pending)
        self._pending.clear()
        return self._file_weights

    def __exit__(self, *_: object) -> None:
        self._reads.close()


def build_lazily(
    path: Path, folder: ModelFolder | None, dtype: torch.dtype, left: LeftInFiles | None = None
) -> LazyCheckpoint:
    """Build the pipeline of `folder`, or the single diffusers network in `path` (None), to be computed in `dtype`.

    Where `left` is known, the weights of a component are read while the next one is built. Raises ModelError, naming
    file and tensor, if the files do not match the networks.
    """
    parts = [_single_network(path)] if folder is None else _networks(folder)
    networks: dict[str, nn.Module] = {}
    with contextlib.ExitStack() as on_failure:
        checkpoint = on_failure.enter_context(LazyCheckpoint())
        for part in parts:
            here = path if folder is None else path / part.name
            stored = read_locations(part.weight_files, part.weight_index)
            network = build_component(path, here, part, dtype, len(stored))
            try:
                checkpoint.add(part.name, network, locate_weights(network, stored, part.name), left)
            except NotLazyLoadable:  # only the library's own loader can load it
                with quietly(), making(here / "config.json", part.class_name):
                    network = class_of(path, part).from_pretrained(str(here), torch_dtype=dtype, local_files_only=True)
            networks[part.name] = network
        checkpoint.pipe = networks[parts[0].name] if folder is None else load_pipeline(folder, dtype, networks)
        on_failure.pop_all()
    return checkpoint


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


def _replace(network: nn.Module, pending: Iterable[tuple[torch.Tensor, PendingTensor]]) -> None:
    """Replace each weight by what was read, wherever `network` has it."""
    now: dict[int, torch.Tensor] = {}
    for weight, tensor in pending:
        assert tensor.value is not None
        value = tensor.value
        now[id(weight)] = nn.Parameter(value, weight.requires_grad) if isinstance(weight, nn.Parameter) else value
    for module in network.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, there in table.items():
                table[name] = now.get(id(there), there)


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
