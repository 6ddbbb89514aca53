"""A single file and a folder with its layout → the tensors of each network, as diffusers' own conversions make them.

Nothing here knows a name of a tensor: diffusers' and transformers' code runs on tensors without values, up to the point
where it would put them into the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import FromOriginalModelMixin, single_file_model, single_file_utils
from transformers import PreTrainedModel

from tightfit.checkpoint.configurations import class_of, first_line
from tightfit.checkpoint.folder import ComponentFolder, ModelFolder
from tightfit.checkpoint.lazy_loading import build_component
from tightfit.checkpoint.loading import quietly
from tightfit.checkpoint.output_files import StoredTensor, TensorSource
from tightfit.checkpoint.recorded_tensors import ConstantTensor, ConvertedTensor, RecordedTensor
from tightfit.checkpoint.sharding import rounded_dtype
from tightfit.checkpoint.tensors import NotLazyLoadable, TensorLocation, locate_weights
from tightfit.errors import ModelError

__all__ = ["NotInFile", "OriginalFile", "tensor_source"]


class NotInFile(ModelError):
    """The file has no weights of this component."""


class OriginalFile:
    """A single safetensors file `path` with the tensors `places`; `layout` is the folder of a model like it.

    `layout` has one component, in the folder itself, if it is not a pipeline.
    """

    def __init__(self, path: Path, places: Mapping[str, TensorLocation], layout: ModelFolder) -> None:
        self._path, self._places, self._layout = path, places, layout

    def tensors_of(self, part: ComponentFolder, dtype: torch.dtype | None) -> dict[str, TensorSource]:
        """Return the weights of a component, rounded to `dtype` (None: as stored), in the order of the file.

        Raises NotInFile if the file has none of them; ModelError, with their names, if it lacks some, or if they do
        not fit the component's configuration.
        """
        kind, here = class_of(self._layout.path, part), self._folder(part)
        network = build_component(self._layout.path, here, part, torch.float32, len(self._places))
        try:
            with contextlib.suppress(NotLazyLoadable):  # of these, the library computes the weights when it loads them
                locate_weights(network, self._places, part.name)
            found: dict[str, Any] = {name: RecordedTensor.stored(place) for name, place in self._places.items()}
        except ModelError as error:
            found = self._converted(part, kind, error)
            once = {name: self._as_stored(found[name]) for name in _once(network, found)}
            locate_weights(network, once, part.name)
        sources = {
            name: tensor_source(value, rounded_dtype(kind, name, value.dtype, dtype)) for name, value in found.items()
        }
        return dict(sorted(sources.items(), key=lambda item: [place.offset for place in item[1].places]))

    def _folder(self, part: ComponentFolder) -> Path:
        return self._layout.path / part.name if self._layout.pipeline_class else self._layout.path

    def _converted(self, part: ComponentFolder, kind: Any, mismatch: ModelError) -> dict[str, Any]:
        """What diffusers makes of the file for a component: those tensors that its network has."""
        tensors = {name: RecordedTensor.stored(place) for name, place in self._places.items()}
        convert = self._conversion(part, kind, tensors)
        if convert is None:
            raise NotInFile(f"{self._path.name} has no weights of {part.name}: {mismatch}", component=part.name)
        try:
            with quietly(), _captured():
                convert(tensors)
            raise NotInFile(f"{kind.__name__} takes no weights from {self._path.name}", component=part.name)
        except _CapturedWeights as made:
            known = made.network.state_dict().keys()
            found = {name: value for name, value in made.weights.items() if value is not None and name in known}
        except (MemoryError, NotInFile):
            raise
        except Exception as error:  # a conversion that misses a tensor raises whatever it happens to
            what = f"{self._path.name} has no weights of {part.name} that diffusers knows"
            raise NotInFile(f"{what}: {first_line(error)}", component=part.name) from error
        if not found:
            what = f"{self._path.name} has no weights of {part.name}, a {kind.__name__}"
            raise NotInFile(f"{what}, among its {len(self._places):,} tensors", component=part.name)
        return found

    def _conversion(
        self, part: ComponentFolder, kind: Any, tensors: Mapping[str, Any]
    ) -> Callable[[dict[str, Any]], object] | None:
        """The function of diffusers that loads the class `kind` from tensors; None if it has none for this file."""
        subfolder = part.name if self._layout.pipeline_class else ""
        layout = {"config": str(self._layout.path), "subfolder": subfolder, "local_files_only": True}
        if issubclass(kind, FromOriginalModelMixin):
            return lambda checkpoint: kind.from_single_file(checkpoint, **layout)
        if not issubclass(kind, PreTrainedModel):
            return None
        if single_file_utils.is_clip_model_in_single_file(kind, tensors):
            return lambda checkpoint: single_file_utils.create_diffusers_clip_model_from_ldm(kind, checkpoint, **layout)
        if single_file_utils.is_t5_in_single_file(tensors) and kind.config_class.model_type == "t5":
            return lambda checkpoint: single_file_utils.create_diffusers_t5_model_from_checkpoint(
                kind, checkpoint, **layout
            )
        return None

    def _as_stored(self, value: torch.Tensor) -> TensorLocation:
        """A location with the shape and dtype of `value`, to check these."""
        state = next(iter(self._places.values())).state
        return TensorLocation(self._path, 0, value.nbytes, value.dtype, tuple(value.shape), state)


def _once(network: torch.nn.Module, names: Collection[str]) -> list[str]:
    """`names` of weights of `network`, one for each tensor that has several."""
    first = {id(value): name for name, value in network.state_dict(keep_vars=True).items() if name in names}
    return list(first.values())


class _CapturedWeights(Exception):
    """Ends a loading function of diffusers with what it was about to put into the network."""

    def __init__(self, network: Any, weights: Mapping[str, Any]) -> None:
        super().__init__(f"{len(weights)} weights")
        self.network, self.weights = network, weights


@contextlib.contextmanager
def _captured() -> Iterator[None]:
    """Let diffusers' loading functions raise _CapturedWeights where they would fill the network.

    They convert, build and fill in one function; this is the only place between. With accelerate installed, all of
    them fill by this function, which both modules import by name.
    """

    def stop(network: Any, weights: Mapping[str, Any], *_args: object, **_options: object) -> None:
        raise _CapturedWeights(network, weights)

    modules: tuple[Any, ...] = (single_file_model, single_file_utils)
    with contextlib.ExitStack() as undo:
        for module in modules:
            undo.callback(setattr, module, "load_model_dict_into_meta", module.load_model_dict_into_meta)
            module.load_model_dict_into_meta = stop
        yield


def tensor_source(value: torch.Tensor, dtype: torch.dtype) -> TensorSource:
    """Return what is to be written of a result of a conversion, rounded to `dtype`."""
    if not isinstance(value, RecordedTensor):
        return ConstantTensor(value, dtype)
    if isinstance(value.origin, TensorLocation):
        return StoredTensor(value.origin, dtype)
    return ConvertedTensor(value, dtype)
