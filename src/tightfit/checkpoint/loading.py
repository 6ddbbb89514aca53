"""A checked model folder → its diffusers pipeline, without output on the terminal; all errors are ModelErrors.

`from_pretrained` of the pipeline's class loads it, from files of the folder only: safetensors, no code. Weights that
the files lack are an error here, not a warning: diffusers leaves them without values, transformers fills them with
random numbers, and images would be neither correct nor reproducible.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._device
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

from tightfit.checkpoint.configurations import check_configurations, first_line
from tightfit.checkpoint.folder import ModelFolder
from tightfit.errors import ModelError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["load_pipeline", "quietly"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MISSING = re.compile(r"^(\S.*?) *\| MISSING\b", re.MULTILINE)  # a row of transformers' load report
_MISMATCH = re.compile(r"^(?P<weight>\S.*?) *\| MISMATCH \|(?P<shapes>.*)", re.MULTILINE)
_UNFILLED = re.compile(r"and are newly initialized: \['([^']+)'")  # diffusers' message without accelerate


def load_pipeline(
    folder: ModelFolder, dtype: torch.dtype | None = None, networks: Mapping[str, Any] | None = None
) -> DiffusionPipeline:
    """Load the pipeline of `folder` on the CPU, with its weights in `dtype` (None: as diffusers chooses).

    Components in `networks` are used as they are. Raises ModelError if diffusers cannot load it, or if the files lack
    weights that the models need.
    """
    asked = {name: value for name, value in (("dtype", dtype), ("variant", folder.variant)) if value is not None}
    given = networks or {}
    with quietly() as notices:
        check_configurations(folder)
        try:
            # by its own class: DiffusionPipeline looks up optional components on itself, finds none, and loads the
            # weights of those that it was given (Wan's transformer) anyway
            pipe = getattr(import_module("diffusers"), folder.pipeline_class).from_pretrained(
                str(folder.path), use_safetensors=True, local_files_only=True, trust_remote_code=False, **asked, **given
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # tokenizers and huggingface_hub raise bare subclasses of Exception
            raise _cannot_load(folder, error, notices) from error
    _check_complete(folder, pipe, notices, given)
    return pipe


def _cannot_load(folder: ModelFolder, error: Exception, notices: list[str]) -> ModelError:
    mismatch = _MISMATCH.search("\n".join(notices))
    cause = f"{mismatch['weight']}: {mismatch['shapes'].strip()}" if mismatch else first_line(error)
    path, class_name = folder.path, folder.pipeline_class
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "load_sub_model":  # diffusers' function that loads one component
            part = next(part for part in folder.components if part.name == frame.f_locals["name"])
            path, class_name = path / part.name, part.class_name
    return ModelError(
        f"cannot load {path} as {class_name}: {cause}",
        path=str(path), class_name=class_name, cause=type(error).__name__,
    )  # fmt: skip


def _check_complete(folder: ModelFolder, pipe: DiffusionPipeline, notices: list[str], given: Mapping[str, Any]) -> None:
    """ModelError if weights that were not `given` have no value (they are still on "meta") or a random one."""
    loaded = {name: part for name, part in pipe.components.items() if name not in given}
    parts = [(name, part) for name, part in loaded.items() if isinstance(part, torch.nn.Module)]
    empty = [f"{name}.{weight}" for name, part in parts for weight, value in part.named_parameters() if value.is_meta]
    said = "\n".join(notices)
    lacking = empty + _MISSING.findall(said) or _UNFILLED.findall(said)
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ModelError(
            f"{folder.path} lacks weights that its models need: {', '.join(lacking[:3])}{more}",
            path=str(folder.path), lacking=lacking,
        )  # fmt: skip


class _Notices(logging.Handler):
    """Collects the libraries' log messages, without colours."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(_COLOUR.sub("", record.getMessage()))


@contextlib.contextmanager
def quietly() -> Iterator[list[str]]:
    """Keep messages of diffusers and transformers off the terminal, and yield the list of them.

    All settings are restored at the end, also torch's default dtype, which diffusers does not restore if a model's
    config is invalid.
    """
    notices = _Notices()
    with warnings.catch_warnings(), contextlib.ExitStack() as undo:
        warnings.simplefilter("ignore", FutureWarning)
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        # transformers replaces torch.linspace while it loads, and torch would cache that one for `with torch.device`
        torch.utils._device._device_constructors()
        if are_progress_bars_disabled():  # transformers enables those of huggingface_hub with its own
            undo.callback(disable_progress_bars)
        for library in ("diffusers", "transformers"):
            _quieten(import_module(f"{library}.utils.logging"), notices, undo)
        yield notices.lines


def _quieten(library: Any, notices: _Notices, undo: contextlib.ExitStack) -> None:
    """Make the logging of one `library` write to `notices` instead of the terminal, without progress bars."""
    undo.callback(library.set_verbosity, library.get_verbosity())
    library.set_verbosity(logging.WARNING)
    if library.is_progress_bar_enabled():
        undo.callback(library.enable_progress_bar)
        library.disable_progress_bar()
    terminal = [handler for handler in library.get_logger().handlers if type(handler) is logging.StreamHandler]
    for handler in terminal:
        undo.callback(library.add_handler, handler)
        library.remove_handler(handler)
    undo.callback(library.remove_handler, notices)
    library.add_handler(notices)
