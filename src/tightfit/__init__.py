"""Run any diffusers pipeline within a memory budget, with the same output."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tightfit.apply.fitting import Fitted, apply_plan
    from tightfit.errors import (
        AlreadyFitted,
        BudgetTooSmall,
        InputError,
        ModelError,
        PlanError,
        RequestError,
        RunError,
        TightfitError,
    )
    from tightfit.plan.planner import make_plan
    from tightfit.report.summary import Report
    from tightfit.run.cache_trials import calibrate
    from tightfit.run.fit import fit
    from tightfit.run.footprints import measure_footprint
    from tightfit.run.load import Loaded, load
    from tightfit.schema.cache_calibration import CacheCalibration
    from tightfit.schema.footprint import Footprint
    from tightfit.schema.machine import Budget, Machine
    from tightfit.schema.plan import Plan
    from tightfit.schema.request import Request
    from tightfit.schema.results import Trace

__all__ = [
    "AlreadyFitted",
    "Budget",
    "BudgetTooSmall",
    "CacheCalibration",
    "Fitted",
    "Footprint",
    "InputError",
    "Loaded",
    "Machine",
    "ModelError",
    "Plan",
    "PlanError",
    "Report",
    "Request",
    "RequestError",
    "RunError",
    "TightfitError",
    "Trace",
    "apply_plan",
    "calibrate",
    "fit",
    "load",
    "make_plan",
    "measure_footprint",
]

# the last five import torch and diffusers, which takes seconds
_MODULES = (
    "errors", "schema.footprint", "schema.request", "schema.machine", "schema.plan", "schema.results", "report.summary",
    "plan.planner", "schema.cache_calibration", "run.fit", "apply.fitting", "run.footprints", "run.load",
    "run.cache_trials",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import public names on first access, so that `tightfit --help` does not load torch."""
    if name in __all__:
        for name_of_module in _MODULES:
            module = import_module(f"tightfit.{name_of_module}")
            if name in module.__all__:
                globals()[name] = value = getattr(module, name)
                return value
    raise AttributeError(f"module 'tightfit' has no attribute {name!r}")
