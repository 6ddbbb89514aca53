"""Options of a command that runs a model → the checked device and plan, and the model loaded for a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tightfit.checkpoint.folder import ModelFolder
from tightfit.devices.choose import choose_device
from tightfit.devices.device import Device
from tightfit.devices.ram import held_bytes
from tightfit.errors import BudgetTooSmall, InputError, TightfitError, unknown_name
from tightfit.run.limits import Limits
from tightfit.run.load import Loaded, load, load_made, load_on_rank
from tightfit.run.models import DTYPES, stored_dtype
from tightfit.run.plan_target import PlanTarget, plan_target_of
from tightfit.run.planning_context import PlannedFolder, machine_of, plan_within
from tightfit.run.simulate import simulate_call
from tightfit.schema.plan import Plan
from tightfit.schema.request import Request
from tightfit.units import format_bytes

__all__ = ["RunOptions", "RunTarget"]


@dataclass(frozen=True)
class RunOptions:
    """What a user says of a model's run, apart from the request. Plain values, which another process may get."""

    choices: dict[str, Any] = field(default_factory=dict)  # Plan fields
    limits: Limits | None = None
    device: str | None = None
    dtype: str | None = None

    def check(self) -> None:
        """Raise PlanError or InputError for what is wrong on any computer."""
        Plan.from_mapping(self.choices)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(unknown_name("dtype", self.dtype, DTYPES), dtype=self.dtype)

    def target(self) -> RunTarget:
        """Return the options' device on this computer. InputError if there is none such; else as `check`."""
        Plan.from_mapping(self.choices)
        plan_target = plan_target_of(self.limits, self.device) if self.limits is not None else None
        named = self.choices.get("device") if self.device is None else self.device
        device = plan_target.devices[0] if plan_target else choose_device(named)
        self.check()
        if plan_target is None and not self.choices and device.kind == "cuda":
            plan_target = PlanTarget(Limits(None), (device,))
        return RunTarget(self, device, plan_target)


@dataclass(frozen=True)
class RunTarget:
    """Checked options, and the device to run on; with a budget, or for free memory, also what to plan for."""

    options: RunOptions
    device: Device
    plan_target: PlanTarget | None

    def dtype_of(self, folder: ModelFolder) -> str:
        """Return the compute dtype: that of the options, or float32 on a CPU and as stored elsewhere."""
        on_cpu = self.device.torch_device.type == "cpu"
        return self.options.dtype or ("float32" if on_cpu else stored_dtype(folder.components))

    @property
    def choices(self) -> dict[str, Any]:
        """The options' Plan fields without the device; level 0 if there are none."""
        return {name: value for name, value in self.options.choices.items() if name != "device"} or {"level": 0}

    def plan(self, folder: ModelFolder, request: Request) -> PlannedFolder | None:
        """Return the plan for `request`; None without a budget to plan for. Raises as `load`; nothing is loaded."""
        if self.plan_target is None:
            return None
        return plan_within(folder.path, request, self.plan_target, self.dtype_of(folder))

    def load(
        self,
        folder: ModelFolder,
        request: Request,
        parallel: Mapping[str, Any] | None = None,
        made: PlannedFolder | None = None,
    ) -> Loaded:
        """Load the model in `folder` to run under the plan for `request`, on the ranks `parallel`.

        `made` is what `plan` returned for them, if it was called. Raises as `tightfit.load`.
        """
        dtype = self.dtype_of(folder)
        if self.plan_target is not None and parallel is not None:
            return load_on_rank(folder, dtype, self.plan_target, request, parallel)
        if self.plan_target is not None:
            made = made or plan_within(folder.path, request, self.plan_target, dtype)
            return load_made(folder, dtype, self.plan_target, made)
        given: dict[str, Any] = {"request": request, "device": self.device, "dtype": dtype, "parallel": parallel}
        return load(folder.path, plan=self.choices, **given)

    def predicted_bytes(self, folder: ModelFolder, request: Request) -> int:
        """Return what a call of the model in `folder` needs: the predicted peaks on all devices of its plan.

        On a CPU with what this process holds. A call that cannot be predicted needs the whole budget, or all that is
        free. Raises as `load`; nothing is loaded.
        """
        held = 0 if self.device.separate else held_bytes()
        if self.plan_target is None:
            return self._simulated_bytes(folder, request, held)
        plan = plan_within(folder.path, request, self.plan_target, self.dtype_of(folder)).plan
        devices = self.plan_target.devices
        if predicted := sum(plan.predicted_peak(device.name) for device in devices):
            return predicted + held
        budget = self.plan_target.limits.budget
        sizes = [budget.of(device.name) if budget is not None else None for device in devices]
        return sum(device.free_bytes() if size is None else size for size, device in zip(sizes, devices, strict=True))

    def _simulated_bytes(self, folder: ModelFolder, request: Request, held: int) -> int:
        """As `predicted_bytes`, for a plan that a user wrote, beside `held` bytes."""
        (accelerator,) = machine_of(self.device).accelerators
        try:
            prediction = simulate_call(folder, accelerator, self.choices, request)
        except TightfitError:
            raise
        except Exception:  # raised by third-party code
            return self.device.free_bytes()
        if not prediction.fits:
            raise BudgetTooSmall(
                f"{request.described} needs {format_bytes(prediction.needed_bytes)} on {self.device.name}, which "
                f"has {format_bytes(prediction.capacity)}",
                needed_bytes=prediction.needed_bytes,
            )
        return max(prediction.peak_reserved, prediction.trace.peak_bytes) + held
