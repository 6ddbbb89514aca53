"""Whether a component's convolutions have channels last, and why: by what was measured, where nobody says."""

from __future__ import annotations

from typing import NamedTuple

from tightfit.records import Accelerator, Component, ComponentPlan

__all__ = ["LayoutChoice", "choose_layout"]

WORTH = 1.05  # times as fast: less is within what measuring varies by


class LayoutChoice(NamedTuple):
    channels_last: bool
    because: str | None  # None where nobody asked


def choose_layout(component: Component, chosen: ComponentPlan, accelerator: Accelerator | None) -> LayoutChoice:
    """Channels last or not for `component`: as was said or, where that is None, where it was measured to be faster.

    `accelerator` knows what was measured, if anything was.
    """
    wanted = chosen.channels_last
    if wanted is False:
        return LayoutChoice(False, None)
    asked, but = ("asked for by name; ", "but ") if wanted else ("", "")
    if not component.convolves:
        return LayoutChoice(bool(wanted), f"{asked}{but}it has no convolutions over pictures")
    dtype = chosen.compute_dtype or component.main_dtype
    gains = accelerator.channels_last_gains if accelerator else {}
    gain = gains.get(f"{component.role}.{dtype}")
    if gain is None:
        where = accelerator.display_name if accelerator else "this device"
        how = f"in {dtype} on {where}" if gains else f"on {where} (`tightfit machine` there would)"
        return LayoutChoice(bool(wanted), f"{asked}whether that is faster was not measured {how}")
    if gain >= WORTH:
        return LayoutChoice(True, f"convolutions ran {gain:.2f} × as fast in it on this computer")
    return LayoutChoice(bool(wanted), f"{asked}{but}convolutions ran only {gain:.2f} × as fast in it on this computer")
