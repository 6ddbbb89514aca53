"""Draws the requests of a batch one after another with one pipeline, which is loaded for the first that fits."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import torch

from tightfit.checkpoint.folder import ModelFolder
from tightfit.checkpoint.lazy_loading import build_folder
from tightfit.errors import BudgetTooSmall, ModelError, RequestError, TightfitError
from tightfit.run.argument_values import described
from tightfit.run.batch_lines import BatchRequest
from tightfit.run.batch_results import DIGEST
from tightfit.run.call_arguments import call_arguments
from tightfit.run.call_errors import explained
from tightfit.run.files import encoded_picture
from tightfit.run.generate import Progress, generate, stopwatch
from tightfit.run.load import Loaded
from tightfit.run.models import find_model, model_title
from tightfit.run.run_target import RunOptions
from tightfit.schema.request import Request

__all__ = ["Drawer", "Drawn", "Failure", "check_requests", "planned_request"]


class Drawn(NamedTuple):
    """The pictures of a request, as PNG files, and what was measured."""

    pictures: tuple[bytes, ...]
    seconds: float  # of the call and its planning, without loading the model
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    device: str
    host: str


class Failure(NamedTuple):
    """Why a request has no pictures: the type of an error, and its message."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return the failure for `error`, raised in a call or while one was planned."""
        found = error if isinstance(error, TightfitError) else explained(error) or error
        own = isinstance(found, TightfitError)
        return cls(type(found).__name__, " ".join((str(found) if own else f"{type(found).__name__}: {found}").split()))


class Drawer:
    """Draws with one model under one set of options. The pipeline stays loaded, and follows a plan for each size."""

    def __init__(self, model: str | None, options: RunOptions) -> None:
        """InputError, PlanError and ModelError for what cannot be used on this computer."""
        self._target, self._folder = options.target(), find_model(model)
        self._title = model_title(model, self._folder)
        self._loaded: Loaded | None = None
        self._too_small: dict[Request, BudgetTooSmall] = {}  # by the request that does not fit

    def draw(self, asked: BatchRequest, progress: Progress | None = None) -> Drawn | Failure:
        """Return the pictures of a request, or why there are none.

        Raises what prevents all requests: a model that cannot be loaded, a plan that is not for it.
        """
        planned = planned_request(asked)
        if planned in self._too_small:
            return Failure.of(self._too_small[planned])
        try:
            loaded = self._load(planned)
            return self._drawn(loaded, asked, progress)
        except BudgetTooSmall as error:
            self._too_small[planned] = error
            return Failure.of(error)
        except RequestError as error:
            return Failure.of(error)
        except Exception as error:
            if self._loaded is None:
                raise
            return Failure.of(error)

    def _load(self, request: Request) -> Loaded:
        if self._loaded is None:
            self._loaded = self._target.load(self._folder, request)
        return self._loaded

    def _drawn(self, loaded: Loaded, asked: BatchRequest, progress: Progress | None) -> Drawn:
        elapsed = stopwatch()
        result = generate(loaded.pipe, loaded.fitted, asked.prompt, asked.request, progress)
        seconds, plan = elapsed(), result.report.plan
        metadata = {
            "prompt": asked.prompt.text,
            "seed": str(asked.prompt.seed),
            "plan": plan.to_json(),
            "model": self._title,
            DIGEST: asked.digest,
            "Software": "tightfit",
        }
        pictures = tuple(encoded_picture(picture, metadata) for picture in result.pictures)
        predicted = plan.predicted_peak(plan.device) or None
        return Drawn(pictures, seconds, predicted, result.report.trace.peak_bytes, plan.device, platform.node())


def planned_request(asked: BatchRequest) -> Request:
    """Return the request to plan for: with descriptions of texts, so that those with other texts share its plan."""
    arguments = {name: described(name, value) for name, value in asked.request.arguments.items()}
    return asked.request.model_copy(update={"arguments": arguments})


def check_requests(folder: ModelFolder, requests: list[BatchRequest]) -> None:
    """Raise RequestError, with its line, for a request that the pipeline in `folder` does not take. Loads no weights.

    A pipeline that cannot be built without weights is not asked.
    """
    try:
        pipe: Any = build_folder(folder, torch.float32)
    except ModelError:
        raise
    except Exception:  # raised by third-party code
        return
    for asked in requests:
        try:
            call_arguments(pipe, asked.prompt, asked.request)
        except RequestError as error:
            raise RequestError(f"line {asked.line}: {error}", **error.facts | {"line": asked.line}) from None
