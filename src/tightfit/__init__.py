"""tightfit: any diffusers pipeline, any memory budget, the same pictures."""

from tightfit.apply.fitting import Fitted, apply_plan, fit
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
from tightfit.records import Budget, Footprint, Machine, Plan, Request, Trace
from tightfit.report.summary import Report

__all__ = [
    "AlreadyFitted",
    "Budget",
    "BudgetTooSmall",
    "Fitted",
    "Footprint",
    "InputError",
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
    "fit",
]
