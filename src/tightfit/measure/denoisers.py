"""The networks of a pipeline that predict its denoising steps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tightfit.measure.modules import find_role

__all__ = ["find_denoisers"]


def find_denoisers(components: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those of `components` that predict steps themselves, without those that help one which does."""
    return {
        name: part
        for name, part in components.items()
        if find_role(name, part) == "denoiser" and not name.startswith(("controlnet", "adapter"))
    }
