"""Live pipeline → Footprint: its networks, their roles, and the blocks and layers of their weights."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack

import torch
from torch import nn

from tightfit.errors import PlanError
from tightfit.measure.shared import give_owners
from tightfit.schema.footprint import Component, Footprint, Role, WeightBlock
from tightfit.simulator.allocator_replay import reserved_for

__all__ = [
    "COMPILED",
    "HANDLE",
    "compiled_around",
    "convolves",
    "find_blocks",
    "find_components",
    "find_layers",
    "find_parts",
    "find_role",
    "has_skips",
    "head_widths",
    "inspect_component",
    "inspect_pipeline",
    "layer_weights",
    "weight_bytes",
    "weight_tensors",
]


COMPILED = "_tightfit_compiled"  # attribute of copies of components with compiled modules
HANDLE = "_tightfit"  # class attribute that holds the Fitted of a module or pipeline that follows a plan


def find_components(pipe: object) -> dict[str, nn.Module]:
    """Return the networks of `pipe`, a diffusers pipeline or a single module (which is then called "model").

    PlanError for anything else.
    """
    if isinstance(pipe, nn.Module):
        return {"model": pipe}
    parts = getattr(pipe, "components", None)
    if not isinstance(parts, Mapping):
        raise PlanError(f"tightfit takes a diffusers pipeline or a torch.nn.Module, not {type(pipe).__name__}")
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def inspect_pipeline(pipe: object) -> Footprint:
    """Return the Footprint of `pipe`, which is not changed."""
    found = find_components(pipe)
    with ExitStack() as undo:
        give_owners(found.values(), undo.callback)
        components = tuple(inspect_component(name, module) for name, module in found.items())
    return Footprint(pipeline=type(pipe).__name__, components=components)


def inspect_component(name: str, module: nn.Module) -> Component:
    """Return the record of the component `name`. Reads only."""
    tensors = {id(tensor): tensor for tensor in weight_tensors(module)}
    left, blocks = dict(tensors), []
    for path, block in find_blocks(module).items():
        blocks.append(_unit(path, list(weight_tensors(block))))
        for tensor in weight_tensors(block):
            left.pop(id(tensor), None)  # tied weights may be in two blocks
    whole = _unit(name, list(tensors.values()))
    layers = find_layers(module)
    large = {id(tensor) for parts in layers.values() for part in parts for tensor in _own(part)}
    return Component(
        name=name,
        class_name=type(module).__name__,
        role=find_role(name, module),
        bytes=whole.bytes,
        allocator_bytes=reserved_for(tensor.nbytes for tensor in tensors.values()),
        dtypes=whole.dtypes,
        blocks=(*blocks, _unit("", list(left.values()))) if blocks else (),
        layers=tuple(_joined(module, {path: _layer(path, parts) for path, parts in layers.items()}, layers)),
        small_tensors=len(tensors.keys() - large),
        has_skip_connections=has_skips(module),
        compiled=bool(compiled_around(module)) or COMPILED in vars(module),
        convolves=convolves(module),
        has_forward=type(module).forward is not nn.Module.forward or any(True for _ in module.children()),
        head_widths=head_widths(module),
    )


def _layer(path: str, parts: tuple[nn.Module, ...]) -> WeightBlock:
    tensors = list({id(tensor): tensor for part in parts for tensor in _own(part)}.values())
    linear = all(isinstance(part, nn.Linear) for part in parts)
    matrices = [tensor for tensor in tensors if linear and tensor.ndim == 2]
    rows = sum(len(matrix) for matrix in matrices)
    return _unit(path, tensors).model_copy(update={"matrices": _bytes_by_dtype(matrices), "rows": rows})


def _joined(
    module: nn.Module, blocks: Mapping[str, WeightBlock], layers: Mapping[str, tuple[nn.Module, ...]]
) -> Iterator[WeightBlock]:
    """Yield the layers; small ones are marked to be loaded together with their neighbours in the same block.

    They are used one after another, unless the block is written otherwise; then they are loaded more than once.
    """
    sizes = {path: _loaded_bytes(tensor for part in parts for tensor in _own(part)) for path, parts in layers.items()}
    most = min(JOINED * _smallest(module), max(sizes.values(), default=0))
    repeated = _repeated_blocks(module)
    first, block, size = "", "", 0
    for path, unit in blocks.items():
        outer = itertools.accumulate(path.split("."), "{}.{}".format)
        around = max(repeated.intersection(outer), key=len, default="")  # the innermost repeated block
        size += sizes[path]
        if len(layers[path]) > 1:  # modules that share weights, and are used at different times
            first = ""
            yield unit
        elif first and around == block and size <= most:
            yield unit.model_copy(update={"moves_with": first})
        else:
            first, block, size = path, around, sizes[path]
            yield unit


def _repeated_blocks(module: nn.Module) -> set[str]:
    """Paths of elements of module lists with others of their class: the model calls these in its own order."""
    found: set[str] = set()
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            count = Counter(type(child) for child in part.children())
            found.update(
                f"{path}.{name}".lstrip(".") for name, child in part.named_children() if count[type(child)] > 1
            )
    return found


def _unit(name: str, tensors: list[torch.Tensor]) -> WeightBlock:
    dtypes = _bytes_by_dtype(tensors)
    return WeightBlock(name=name, bytes=sum(dtypes.values()), dtypes=dtypes)


def _bytes_by_dtype(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return dict(dtypes)


def has_skips(module: nn.Module) -> bool:
    """Whether `module` is a U-Net: outputs of its down blocks are kept for its up blocks."""
    halves = getattr(module, "down_blocks", None), getattr(module, "up_blocks", None)
    return all(isinstance(half, nn.ModuleList) for half in halves)


def convolves(module: nn.Module) -> bool:
    """Whether `module` has more weights in 2D convolutions than in 3D ones.

    Only convolutions with one group and overlapping windows count: those that act as linear layers on points or patches
    do not.
    """
    weights = {nn.Conv2d: 0, nn.Conv3d: 0}
    for part in module.modules():
        if not isinstance(part, nn.Conv2d | nn.Conv3d):
            continue
        if part.groups == 1 and any(map(operator.gt, part.kernel_size, part.stride)):
            weights[nn.Conv2d if isinstance(part, nn.Conv2d) else nn.Conv3d] += part.weight.numel()
    return weights[nn.Conv2d] > weights[nn.Conv3d]


def head_widths(module: nn.Module) -> tuple[int, ...]:
    """Head dimensions of the attention layers in `module`, ascending, where its submodules have the usual names."""
    widths = set()
    for part in module.modules():
        heads = getattr(part, "heads", None) or getattr(part, "num_heads", None)
        queries = getattr(part, "to_q", None)
        if isinstance(heads, int) and isinstance(queries, nn.Linear):
            widths.add(queries.out_features // heads)
    return tuple(sorted(widths))


def find_role(name: str, module: nn.Module) -> Role:
    """Return the role of a component, from its methods, its library and its name."""
    encodes, decodes = (callable(getattr(module, method, None)) for method in ("encode", "decode"))
    from_transformers = type(module).__module__.partition(".")[0] == "transformers"
    if decodes and (encodes or not from_transformers):
        return "autoencoder"
    if "safety" in name or "vocoder" in name:
        return "other"
    if from_transformers:
        return "encoder"
    return "denoiser"


def find_parts(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return submodules of the component `name` that a pipeline may call directly, by path.

    For denoisers and autoencoders, which have many and call them often (in strips), and for compiled components only
    the direct children; else all but the submodules of repeated blocks.
    """
    if find_role(name, module) in ("denoiser", "autoencoder") or compiled_around(module):
        return dict(module.named_children())
    blocks = tuple(f"{path}." for path in find_blocks(module))
    return {path: part for path, part in module.named_modules() if path and not path.startswith(blocks)}


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of `module` by dotted path: the elements of its outermost module lists."""
    return {path: block for path, block in _blocks(module, "") if any(True for _ in block.parameters())}


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict)  # has no forward of its own; its elements have
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if listed and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield path, child
        else:
            yield from _blocks(child, f"{path}.")


SMALLEST = 2**20  # bytes from which weights are transferred by themselves …
SMALLEST_SHARE = 1 / 1000  # … or this share of a component's weights, where that is less
JOINED = 16  # weights up to this multiple are loaded together: some 0.7 ms on a link, 0.03 ms on the host


def _smallest(module: nn.Module) -> int:
    return max(min(SMALLEST, int(_loaded_bytes(weight_tensors(module)) * SMALLEST_SHARE)), 1)


def find_layers(module: nn.Module) -> dict[str, tuple[nn.Module, ...]]:
    """Return the submodules of `module` with large parameters of their own, used in their own forward, by dotted path.

    A layer is one module, or several that share a parameter. Left out are modules with other layers inside (their own
    parameters are needed throughout their forward) and small ones.
    """
    own = {path: (part, _own(part)) for path, part in module.named_modules()}
    least = _smallest(module)
    large = {path for path, (_, owned) in own.items() if owned and _loaded_bytes(owned) >= least}
    around = {path[:end] for path in large for end, sign in enumerate(path) if sign == "."} | ({""} if large else set())
    layers: dict[str, tuple[nn.Module, ...]] = {}
    stores: dict[int, str] = {}  # layer path by parameter id
    for path, (part, owned) in own.items():
        if path in large - around:
            layer = next((stores[id(tensor)] for tensor in owned if id(tensor) in stores), path)
            layers[layer] = (*layers.get(layer, ()), part)
            stores.update((id(tensor), layer) for tensor in owned)
    shared = Counter(id(tensor) for _, owned in own.values() for tensor in owned)
    return {layer: parts for layer, parts in layers.items() if _complete(parts, shared)}


def layer_weights(module: nn.Module) -> set[int]:
    """Ids of the parameters that the layers own."""
    parts = [part for parts in find_layers(module).values() for part in parts]
    return {id(parameter) for part in parts for parameter in part.parameters(recurse=False)}


def compiled_around(network: nn.Module) -> dict[int, nn.Module]:
    """Return the compiled modules inside `network` and their submodules, by id, each as the outermost compiled one.

    If the whole network is compiled, that does not count, as there would be no place for hooks: they cause graph breaks
    in the compiled code then.
    """
    outermost: dict[int, nn.Module] = {}
    for module in network.modules():
        if module._compiled_call_impl is not None and module is not network:
            for part in module.modules():
                outermost.setdefault(id(part), module)
    return outermost


def _loaded_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors as loaded, also where they are stored in fewer: the layers found are the same."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _complete(parts: tuple[nn.Module, ...], shared: Counter[int]) -> bool:
    """Whether no other module than `parts` has one of their parameters."""
    held = Counter(id(tensor) for part in parts for tensor in _own(part))
    return all(shared[key] == count for key, count in held.items())


def weight_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of `module`, each once."""
    seen: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers of `module`, tied ones once."""
    return sum(tensor.nbytes for tensor in weight_tensors(module))
