"""Changes of single Plan fields: --set, and what makes the choices of a user lossless. Does not import torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from tightfit.errors import PlanError
from tightfit.schema.attention import BACKENDS
from tightfit.schema.plan import ComponentPlan, Plan

__all__ = ["lossless_choices", "parse_change", "set_fields"]

Change = tuple[list[str], Any]  # the path of a field, and its new value

# field of a component → fields that a complete plan derives from it
_DERIVED_FIELDS = {
    "placement": ("weight_memory", "granularity", "ring_buffer", "resident_layers", "pinned"),
    "offload_to": ("granularity", "ring_buffer", "resident_layers", "pinned"),
    "storage": ("granularity", "ring_buffer", "resident_layers", "pinned"),
    "weight_memory": ("granularity", "ring_buffer", "resident_layers"),
    "granularity": ("ring_buffer", "resident_layers"),
    "ring_buffer": ("resident_layers",),
}


def parse_change(change: str) -> Change:
    """Return the path and the value of FIELD=VALUE. PlanError if it is no such text."""
    field, equals, text = change.partition("=")
    if not equals or not all(field.split(".")):
        raise PlanError(f"--set {change!r} is not FIELD=VALUE, e.g. --set vae.tile=256")
    return field.split("."), _value(change, text)


def set_fields(choices: dict[str, Any], changes: Sequence[Change]) -> None:
    """Set Plan fields in `choices`; what a complete plan derived from them, or predicted, is removed."""
    if changes:  # the forecast is not valid for the changed plan
        choices.pop("forecast", None)
    _drop_derived(choices, [path for path, _ in changes])
    for path, value in changes:
        _set(choices, path, value)


def lossless_choices(choices: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return `choices`, for which `plan` was made, without what makes it lossy."""
    changed = copy.deepcopy(dict(choices))
    changes = [change for name, component in plan.components.items() for change in _undoing(name, component)]
    if any(what.startswith("blended-tiling") for what in plan.lossy):
        changes += [(["vae", "tile"], None), (["vae", "overlap"], 0.25)]
    set_fields(changed, changes)
    return changed


def _undoing(name: str, component: ComponentPlan) -> Iterable[Change]:
    """Yield what makes the component `name` lossless."""
    fields: dict[str, Any] = {}
    if component.technique:
        fields |= {"storage": "as-loaded", "skip_patterns": None, "compute_dtype": None}
    if (backend := BACKENDS.get(component.attention)) and backend.technique:
        fields["attention"] = "auto"
    if component.cache is not None and not component.cache.lossless:
        fields["cache"] = None
    return ((["components", name, field], value) for field, value in fields.items())


def _drop_derived(choices: dict[str, Any], paths: list[list[str]]) -> None:
    """Remove from `choices` the fields that derive from fields in `paths`, so that they are resolved anew."""
    components = choices.get("components")
    for path in paths:
        chosen = components.get(path[1]) if isinstance(components, dict) and len(path) == 3 else None
        if path[0] == "components" and isinstance(chosen, dict):
            for derived in _DERIVED_FIELDS.get(path[2], ()):
                if [*path[:2], derived] not in paths:
                    chosen.pop(derived, None)


def _value(change: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: an invalid date
        raise PlanError(f"--set {change!r}: the value is not YAML") from None


def _set(fields: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        fields = fields.setdefault(name, {})
        if not isinstance(fields, dict):
            raise PlanError(f"--set {'.'.join(path)}: {name} has no fields inside")
    fields[path[-1]] = value
