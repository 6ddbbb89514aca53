"""What is kept of a plan for as long as somebody has the pipeline, or one of its components."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from tightfit.apply.method_overrides import own_class
from tightfit.apply.session import Session
from tightfit.apply.weights.device_offloaders import DeviceOffloaders
from tightfit.apply.weights.file_backed_weights import FileBackedWeights

__all__ = ["AppliedPlan", "collect_old_plans", "fill_and_close", "show_own_class"]

COLLECTED = 8  # plans, after which what is left of them, about a megabyte each in cycles of references, is collected
_plans = itertools.count(1)


@dataclass(eq=False)
class AppliedPlan:
    """What a plan did to a pipeline, and how to undo it. The pipeline and its components keep it, not their handle.

    So a pipeline that nobody has any more is freed, though its handle is kept.
    """

    file_weights: FileBackedWeights
    places: DeviceOffloaders
    session: Session
    undo: ExitStack


def fill_and_close(file_weights: FileBackedWeights, components: Iterable[nn.Module]) -> None:
    """Load the weights that are only in files, and close the files, unless another plan follows."""
    if not file_weights.keep_in_files:
        for module in components:
            file_weights.fill(module)
        file_weights.close()


def show_own_class(pipe: weakref.ref[Any], file_weights: FileBackedWeights) -> None:
    """Make the pipeline an instance of its own class again, unless another plan follows.

    Calls of other threads wait in the earlier plan's `__call__` meanwhile, and then follow that plan.
    """
    alive = pipe()
    if alive is not None and not file_weights.keep_in_files:
        object.__setattr__(alive, "__class__", own_class(alive))


def collect_old_plans() -> None:
    """Collect what is left of earlier plans, now and then: a collection takes a few tenths of a second."""
    if next(_plans) % COLLECTED == 0:
        gc.collect()
