"""Whether ranks have the same weights, found out by a few values of every tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from tightfit.apply.context_parallel.rank_group import RankGroup
from tightfit.apply.weights.weight_store import plain_parts
from tightfit.measure.modules import weight_tensors

__all__ = ["differing_components"]

SAMPLES = 16  # values of a tensor


def differing_components(group: RankGroup, components: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return names of the `components` of which ranks of `group` have different weights. Collective.

    Tensors without values (of weights that are still in files) are not compared.
    """
    digests = {name: _digest(module) for name, module in components.items()}
    with group.call():
        said = group.all_gather_text("\n".join(f"{name} {digest}" for name, digest in digests.items()))
    of_ranks = [dict(line.rsplit(" ", 1) for line in text.split("\n") if line) for text in said]
    names = dict.fromkeys(name for digests in of_ranks for name in digests)
    return tuple(name for name in names if len({digests.get(name) for digests in of_ranks}) > 1)


def _digest(module: nn.Module) -> str:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in (part for tensor in weight_tensors(module) for part in plain_parts(tensor) if not part.is_meta):
        by_device.setdefault(part.device, []).append(_samples(part.detach().as_subclass(torch.Tensor)))
    return hashlib.sha256(_bytes(by_device.values())).hexdigest()


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of up to SAMPLES of its values, at equal distances."""
    flat = tensor.flatten() if tensor.is_contiguous() else tensor[:1].flatten()
    return flat[:: max(len(flat) // SAMPLES, 1)][:SAMPLES].contiguous().view(torch.uint8)


def _bytes(samples: Iterable[list[torch.Tensor]]) -> bytes:
    return b"".join(torch.cat(some).cpu().numpy().tobytes() for some in samples)
