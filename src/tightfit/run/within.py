"""A folder and devices → the Plan that it is to be loaded for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

from tightfit.checkpoint.folder import check_folder
from tightfit.checkpoint.shapes import build_folder
from tightfit.errors import InputError, RequestError
from tightfit.progress import showing
from tightfit.records import Plan, Request
from tightfit.run.arguments import Given
from tightfit.run.experiences import PlanningInputs, measured
from tightfit.run.footprints import Measurer
from tightfit.run.machines import machine_now
from tightfit.run.shape import asked_by
from tightfit.run.site import PlanTarget
from tightfit.run.unmeasured import plan_unmeasured, with_reason

__all__ = ["PlannedFolder", "plan_within"]


class PlannedFolder(NamedTuple):
    """A plan, and what it was made from; None where its call could not be measured."""

    plan: Plan
    basis: PlanningInputs | None


def plan_within(
    path: Path, request: Request | None, site: PlanTarget, dtype: str, example: Mapping[str, Any] | None = None
) -> PlannedFolder:
    """The plan for a call of the pipeline in the folder `path` within a site's limits: for `request`, or the `example`.

    On a CPU what this process holds by now is part of the budget: what measuring left behind goes first.
    """
    asked, given = request or Request(), None
    if example is not None:
        kind = getattr(diffusers, check_folder(path).pipeline_class)
        asked, given = asked_by(object.__new__(kind), example), Given(example, site.devices[0].torch_device)
    try:
        measurer = Measurer(path, dtype, expandable=site.expandable)
        with showing("planning", {}):
            basis = measured(measurer, asked, given, site.limits, lambda: machine_now(*site.devices))
    except InputError as error:
        if request is not None or not isinstance(error, RequestError):
            raise
        return _unmeasured(path, asked, site, dtype, error)
    except Exception as error:  # of anybody's code
        return _unmeasured(path, asked, site, dtype, error)
    return PlannedFolder(basis.plan(site.limits), basis)


def _unmeasured(path: Path, asked: Request, site: PlanTarget, dtype: str, error: Exception) -> PlannedFolder:
    pipe = build_folder(check_folder(path), getattr(torch, dtype))
    return PlannedFolder(with_reason(plan_unmeasured(pipe, site), asked, error), None)
