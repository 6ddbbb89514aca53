"""What processes of a Ray cluster do for a batch: predict peaks on a node, and draw. Uses no Ray itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

from tightfit.errors import BudgetTooSmall, RequestError
from tightfit.run.batch_lines import BatchRequest
from tightfit.run.drawer import Drawer, Drawn, Failure
from tightfit.run.models import find_model
from tightfit.run.run_target import RunOptions
from tightfit.schema.request import Request

__all__ = ["BatchWorker", "NodePeaks", "predict_peaks"]


class NodePeaks(NamedTuple):
    """Predicted peaks of requests on one node, in their order."""

    version: str  # of tightfit there
    peaks: tuple[int | Failure, ...]


class BatchWorker:
    """An actor that keeps its pipeline loaded."""

    def __init__(self, model: str | None, options: RunOptions) -> None:
        self._model, self._options = model, options

    def ready(self) -> int:
        """Return the number of the process, once it runs."""
        return os.getpid()

    @functools.cached_property
    def _drawer(self) -> Drawer:
        return Drawer(self._model, self._options)

    def draw(self, asked: BatchRequest) -> Drawn | Failure:
        """Return the pictures of a request as files, or why there are none."""
        try:
            return self._drawer.draw(asked)
        except Exception as error:  # of the model's files, of a library: it is the driver that goes on
            return Failure.of(error)


def predict_peaks(model: str | None, options: RunOptions, requests: Sequence[Request]) -> NodePeaks:
    """Return what each request needs on this node: the predicted peak of its plan, in bytes, or why it cannot run.

    On a CPU with what the process holds. A call that cannot be predicted needs the whole budget, or all that is free.
    Raises InputError for options and models that cannot be used here.
    """
    target, folder = options.target(), find_model(model)
    found: list[int | Failure] = []
    for request in requests:
        try:
            found.append(target.predicted_bytes(folder, request))
        except (BudgetTooSmall, RequestError) as error:
            found.append(Failure.of(error))
    return NodePeaks(version("tightfit"), tuple(found))
