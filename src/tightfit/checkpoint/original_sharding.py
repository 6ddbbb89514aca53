"""A single safetensors file and a layout → the list of files of the diffusers folder to write."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tightfit.checkpoint.configurations import check_configuration, check_configurations, class_of
from tightfit.checkpoint.folder import ComponentFolder, ModelFolder, check_folder, network_folder
from tightfit.checkpoint.headers import file_error, listed, mode_of, read_json
from tightfit.checkpoint.loading import quietly
from tightfit.checkpoint.originals import NotInFile, OriginalFile
from tightfit.checkpoint.output_files import OutputFile, TensorFile, TextFile
from tightfit.checkpoint.sharding import choose_component, config_file, kept_files, plan_component, plan_weights
from tightfit.checkpoint.tensors import TensorLocation, read_locations
from tightfit.errors import InputError, ModelError

__all__ = ["FilePlan", "plan_original"]

_STEMS = {"transformers": "model"}  # of weight files; those of diffusers are:
_STEM = "diffusion_pytorch_model"


class FilePlan(NamedTuple):
    """The files to write, and what is to be said of them."""

    files: list[OutputFile]
    notes: tuple[str, ...] = ()


def plan_original(
    source: Path,
    config: Path | None,
    component: str | None,
    max_shard: int,
    dtype: torch.dtype | None,
) -> FilePlan:
    """Return the files of the model in the single file `source`, in shards of at most `max_shard` bytes.

    `config` is a pipeline's folder, or one network's, whose weights need not be there (None: the folder of `source`).
    All components of a pipeline are written, or one as a folder of its own; those that `source` has no weights of are
    copied. Raises ModelError, naming file and component, if weights are missing or do not fit.
    """
    folder = _layout(source, config)
    places = read_locations([source])
    if not places:
        raise file_error(source, "has 0 tensors: there is nothing to write")
    layout = _checked_layout(folder, source)
    planner = _OriginalPlanner(source, places, layout, max_shard, dtype)
    if not layout.pipeline_class:
        if component is not None:
            what = f"{layout.path} is the layout of one network, {layout.components[0].class_name}"
            raise InputError(f"{what}: leave --component {component} out", component=component)
        files = planner.single(layout.components[0], layout.path)
    elif component is not None:
        files = planner.single(choose_component(layout, component), layout.path / component)
    else:
        files = planner.pipeline()
    return FilePlan(files, (*planner.notes, *_left_out(source, places, files)))


def _layout(source: Path, config: Path | None) -> Path:
    if source.suffix != ".safetensors":
        pickled = source.suffix in (".ckpt", ".pt", ".pth", ".bin")
        why = "is a pickle, which can run code when it is read" if pickled else "is no safetensors file"
        raise file_error(source, f"{why}: only .safetensors are read", suffix=source.suffix)
    if config is not None:
        return config
    if mode_of(source.parent / "config.json"):
        return source.parent
    what = "has only tensors, and there is no config.json beside it: name a folder with the layout of its model"
    raise file_error(source, f"{what} (model_index.json and configurations, or config.json) as --config FOLDER")


def _checked_layout(path: Path, source: Path) -> ModelFolder:
    """The layout in `path`; all components that are networks have `source` as their weights, if they have no other."""
    if mode_of(path / "config.json") and not mode_of(path / "model_index.json"):
        layout = ModelFolder(path, "", (network_folder(path, weights_needed=False),))
    else:
        layout = check_folder(path, weights_needed=False)
    size = source.stat().st_size
    with quietly():
        supposed = tuple(
            part if part.weight_files or not _is_network(path, part) else
            dataclasses.replace(part, weight_files=(source,), weight_bytes=size)
            for part in layout.components
        )  # fmt: skip
        if layout.pipeline_class:
            check_configurations(dataclasses.replace(layout, components=supposed))
        else:
            check_configuration(path / "config.json", class_of(path, supposed[0]), supposed[0])
    return dataclasses.replace(layout, components=supposed)


def _is_network(root: Path, part: ComponentFolder) -> bool:
    return issubclass(class_of(root, part), torch.nn.Module)


class _OriginalPlanner:
    """Finds each component's weights; `notes` says where they are not from the file."""

    def __init__(
        self,
        source: Path,
        places: dict[str, TensorLocation],
        layout: ModelFolder,
        max_shard: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._source, self._layout, self._max_shard, self._dtype = source, layout, max_shard, dtype
        self._original = OriginalFile(source, places, layout)
        self.notes: list[str] = []

    def single(self, part: ComponentFolder, folder: Path) -> list[OutputFile]:
        """Files of one network, as a folder of its own."""
        weights = self._weights(part, folder, "")
        return [*weights, *kept_files(folder, {file.name for file in weights})]

    def _weights(self, part: ComponentFolder, folder: Path, prefix: str) -> list[OutputFile]:
        tensors = self._original.tensors_of(part, self._dtype)
        planned = plan_weights(f"{prefix}{_STEMS.get(part.library, _STEM)}", tensors, self._max_shard)
        return planned if self._dtype is None else [*planned, *config_file(folder, prefix, part, self._dtype)]

    def pipeline(self) -> list[OutputFile]:
        """Files of the whole pipeline. ModelError if a network's weights are nowhere."""
        weights: list[OutputFile] = []
        found, lost, left = [], dict[str, NotInFile](), []
        for part in [part for part in self._layout.components if part.weight_files]:
            of_layout = part.weight_files != (self._source,)
            if "safety" in part.name:  # diffusers looks for none in a single file
                left += [] if of_layout else [part.name]
                weights += self._copied(part) if of_layout else []
                continue
            try:
                weights += self._weights(part, self._layout.path / part.name, f"{part.name}/")
                found.append(part.name)
            except NotInFile as error:
                if of_layout:
                    weights += self._copied(part)
                else:
                    lost[part.name] = error
        if lost or not found:
            raise self._incomplete(found, lost)
        instead = {file.name for file in weights}
        kept = [file for file in kept_files(self._layout.path, instead) if file.name.partition("/")[0] not in left]
        return [*weights, *(self._without(left) if file.name == "model_index.json" else file for file in kept)]

    def _copied(self, part: ComponentFolder) -> list[OutputFile]:
        self.notes.append(f"{part.name} is not in {self._source.name}, and was copied from the layout")
        return plan_component(self._layout, part, self._max_shard, self._dtype)

    def _incomplete(self, found: list[str], lost: dict[str, NotInFile]) -> ModelError:
        source, layout = self._source.name, self._layout.path
        first = next(iter(lost.values()), f"{source} has no weights of any component of {layout}")
        if not found:
            return ModelError(
                f"{first}: is {layout} the layout of this file?", file=str(self._source), lost=sorted(lost)
            )
        what = (
            f"{source} has the weights of {', '.join(found)}, and of {', '.join(lost)} neither it nor {layout} has any"
        )
        how = f"put them there, or take one network with --component {found[0]}"
        return ModelError(f"{what}: {how} ({first})", file=str(self._source), lost=sorted(lost))

    def _without(self, left: list[str]) -> OutputFile:
        """model_index.json, with the components that are left out as null."""
        index = read_json(self._layout.path / "model_index.json")
        index |= {name: [None, None] for name in left}
        return TextFile("model_index.json", json.dumps(index, indent=2) + "\n")


def _left_out(source: Path, places: dict[str, TensorLocation], files: list[OutputFile]) -> Iterator[str]:
    """Yield a note if there are tensors that nothing is made from."""
    tensors = [tensor for file in files if isinstance(file, TensorFile) for tensor in file.tensors.values()]
    used: set[Any] = {place for tensor in tensors for place in tensor.places}
    left = [name for name, place in places.items() if place not in used]
    if left:
        yield f"left out {len(left)} of {len(places):,} tensors of {source.name} that no network has: {listed(left)}"
