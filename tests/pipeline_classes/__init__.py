"""Recipes: a tiny instance of every diffusers pipeline class that can be made from configurations alone.

`cases()` has them, `left_out()` says of the others why not; `proof.py` runs them.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from tiny_pipelines import CASES, TinyCase

__all__ = ["cases", "left_out"]


def cases() -> dict[str, TinyCase]:
    """One for each class, by its name without the ending "Pipeline"."""
    from more_pipelines import MORE_CASES

    found = [case for module in _modules() for case in getattr(module, "CASES", ())]
    return {case.name: case for case in (*CASES, *MORE_CASES, *found)}


def left_out() -> dict[str, str]:
    """Why classes have none, by their whole name."""
    bases = dict.fromkeys(("DiffusionPipeline", "ModularPipeline"), "what others are derived from")
    return bases | {name: why for module in _modules() for name, why in getattr(module, "OPTIONAL_PARTS", {}).items()}


def _modules() -> list[ModuleType]:
    return [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
