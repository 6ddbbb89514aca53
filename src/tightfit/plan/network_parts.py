"""Which blocks and layers of a network are in which part, where it is split over several devices.

Blocks are in the order in which they run: that of the network's definition, but in a U-Net the middle block is before
the up blocks. What is outside of blocks is in the first part, but for modules that a later part names: those that run
after the last block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tightfit.errors import PlanError, unknown_name
from tightfit.plan.layer_selection import resolve_streaming
from tightfit.schema.footprint import Component
from tightfit.schema.network_part import PART_FIELDS, NetworkPart
from tightfit.schema.plan import ComponentPlan

__all__ = [
    "block_order",
    "check_split",
    "finder_of",
    "order_of",
    "overlaps_parts",
    "part_finder",
    "part_of",
    "resolve_parts",
]

_MIDDLE, _LATE = "mid_block", "up_blocks."  # of a U-Net


def block_order(blocks: Iterable[str], *, has_skips: bool) -> list[str]:
    """Return the paths of `blocks` in the order in which they run; `has_skips`: of a U-Net, with its middle block.

    What is in the middle block stays together: its own blocks run in turns.
    """
    order = [path for path in blocks if path]
    late = [path for path in order if has_skips and path.startswith(_LATE)]
    if not late:
        return order
    early = [path for path in order if path.startswith("down_blocks.")]
    others = [path for path in order if path not in {*early, *late} and not path.startswith(f"{_MIDDLE}.")]
    return [*early, _MIDDLE, *late, *others]


def part_finder(order: Sequence[str], later: Iterable[NetworkPart]) -> Callable[[str], int]:
    """Return a function from the path of a module to the index of its part; `later` are all parts but the first.

    Modules around blocks are in the first part.
    """
    parts = list(later)
    begins = [order.index(part.first) for part in parts]
    part_of_module = {path: sum(place >= begin for begin in begins) for place, path in enumerate(order)}
    part_of_module |= {path: index for index, part in enumerate(parts, 1) for path in part.outside}

    def find(path: str) -> int:
        while path:
            if path in part_of_module:
                return part_of_module[path]
            path = path.rpartition(".")[0]
        return 0

    return find


def check_split(component: Component, chosen: ComponentPlan) -> None:
    """Raise PlanError where `chosen` splits `component` at something that is no block, or not in their order."""
    if not chosen.split:
        return
    if component.role == "autoencoder":
        raise PlanError(
            f"{component.name} is an autoencoder, which is not split: vae.strips is how it takes less memory",
            name=component.name,
        )
    order, last = order_of(component), 0
    for device, part in chosen.split.items():
        if part.first not in order:
            raise PlanError(unknown_name(f"block of {component.name}", part.first, order), name=part.first)
        place = order.index(part.first)
        if place == 0:
            raise PlanError(
                f"{component.name} begins with {part.first}: that leaves no block before the part on {device}; to "
                f"move all of it there, set components.{component.name}.device",
                name=part.first,
            )
        if place <= last:
            raise PlanError(
                f"{component.name} runs {part.first} before {order[last]}: split names its parts in that order",
                name=part.first,
            )
        last = place


def part_of(component: Component, chosen: ComponentPlan, index: int) -> Component:
    """Return the record of one part of `component`, with its own blocks, layers and bytes; under the same name."""
    if not chosen.split:
        return component
    find = finder_of(component, chosen)
    layers = tuple(layer for layer in component.layers if find(layer.name) == index)
    blocks = tuple(block for block in component.blocks if block.name and find(block.name) == index)
    size = sum(block.bytes for block in blocks) + _outside(component, find, index)
    share = size / max(component.bytes, 1)
    return component.model_copy(
        update={
            "bytes": size,
            "allocator_bytes": round(component.allocator_bytes * share),
            "gradient_bytes": round(component.gradient_bytes * share),
            "small_tensors": round(component.small_tensors * share),
            "blocks": blocks,
            "layers": layers,
        }
    )


def _outside(component: Component, find: Callable[[str], int], index: int) -> int:
    """Return the bytes that the part `index` has outside of blocks, and in a U-Net's middle block between its own."""
    inside = tuple(f"{block.name}." for block in component.blocks if block.name)
    layers = [layer for layer in component.layers if not f"{layer.name}.".startswith(inside)]
    if index:
        return sum(layer.bytes for layer in layers if find(layer.name) == index)
    whole = next((block.bytes for block in component.blocks if not block.name), 0)
    return whole - sum(layer.bytes for layer in layers if find(layer.name))


def resolve_parts(
    component: Component, chosen: ComponentPlan, seconds: Mapping[str, float] | None = None
) -> ComponentPlan:
    """Return `chosen` with the streaming of all of its parts resolved (`resolve_streaming`). Raises PlanError."""
    if not chosen.split:
        return resolve_streaming(component, chosen, seconds) if chosen.placement == "stream" else chosen
    check_split(component, chosen)
    find = finder_of(component, chosen)

    def resolved(index: int, plan: ComponentPlan) -> ComponentPlan:
        own = plan.resident_layers
        if own is not None and (not index or own == chosen.resident_layers):  # named for all parts
            plan = plan.model_copy(update={"resident_layers": tuple(name for name in own if find(name) == index)})
        part = part_of(component, chosen, index)
        return resolve_streaming(part, plan, seconds) if plan.placement == "stream" else plan

    done = [resolved(index, plan) for index, plan in enumerate(chosen.parts("").values())]
    first, *others = done
    split = {
        device: part.model_copy(update={name: getattr(plan, name) for name in PART_FIELDS})
        for (device, part), plan in zip(chosen.split.items(), others, strict=True)
    }
    return first.model_copy(update={"split": split, "device": chosen.device})


def overlaps_parts(chosen: ComponentPlan) -> bool:
    """Whether the parts of a network work at the same time, on different chunks of a batch."""
    later = any(part.outside for part in chosen.split.values())
    return later and chosen.splits_batch and chosen.placement != "stream"


def order_of(component: Component) -> list[str]:
    """Return the paths of the blocks of `component` in the order in which they run."""
    return block_order((block.name for block in component.blocks), has_skips=component.has_skip_connections)


def finder_of(component: Component, chosen: ComponentPlan) -> Callable[[str], int]:
    """Return a function from the path of a module of `component` to the index of its part by `chosen`."""
    return part_finder(order_of(component), chosen.split.values())
