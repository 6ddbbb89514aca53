"""Names → known models and known cards."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from pydantic import Field

from tightfit.catalog.clock import host_rates, rates
from tightfit.errors import InputError, unknown_name
from tightfit.schema.base import Positive, Record
from tightfit.schema.machine import Accelerator
from tightfit.schema.request import Request

__all__ = [
    "KnownComponent",
    "KnownModel",
    "card_called",
    "card_facts",
    "card_names",
    "known_card",
    "known_model",
    "model_called",
    "model_names",
]

# Host seconds for each use of a streamed or a resident layer: half of what bench/host_cost.py measured for FLUX.1 on a
# busy server's core, with torch's own CUDA code and no driver (28 us, of which the copy's launch took 2, and 4.6 us)
STREAMED_OVERHEAD, RESIDENT_OVERHEAD = 13e-6, 2.3e-6
# Between cards of a computer: fractions of the nominal rate each way, while as much comes back. NVLink: 375 of 450 GB/s
# for copies between two H100 (NVIDIA/nccl issue 1264), 215 to 260 of 300 between A100 (NVIDIA/nccl-tests issue 149).
# Through the host: 12.9 of 25 GB/s between RTX 4090, which cannot reach each other's memory (open-gpu-kernel-modules
# issue 6 of tinygrad). Small messages of NCCL took 30 to 50 us (nccl-tests issue 214, nccl issue 1530).
NVLINK_SHARE, THROUGH_HOST_SHARE = 0.83, 0.52
EXCHANGE_LATENCY = 40e-6  # seconds


class KnownComponent(Record):
    """A part of a known model: a network, a tokenizer or a scheduler."""

    library: str
    class_name: str = Field(alias="class")
    config: dict[str, Any] = Field(default_factory=dict)
    dtype: str | None = None  # in which a network's weights are usually loaded
    parameters: Positive | None = None
    source: str


class KnownModel(Record):
    """A pipeline whose configuration is known, and its usual request."""

    name: str
    title: str
    repository: str
    source: str
    pipeline: str
    options: dict[str, Any] = Field(default_factory=dict)
    options_source: str = ""
    absent: tuple[str, ...] = ()  # optional components that are left out
    request: Request
    request_source: str
    dtype_source: str
    components: dict[str, KnownComponent]


@functools.cache
def model_names() -> tuple[str, ...]:
    folder = files("tightfit.catalog") / "models"
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))


def model_called(name: str) -> str:
    """Return the catalog's name of a model: "flux.1-dev" also for "FLUX1 dev". InputError with the nearest name."""
    return _own_name("model in the catalog", name, model_names())


def known_model(name: str) -> KnownModel:
    """Return the known model `name`, e.g. "flux.1-dev"; InputError with the nearest name if there is none."""
    own = model_called(name)
    return KnownModel.from_text((files("tightfit.catalog") / "models" / f"{own}.json").read_text())


@functools.cache
def _cards() -> dict[str, Any]:
    cards: dict[str, Any] = json.loads((files("tightfit.catalog") / "cards.json").read_text())
    return cards


def card_names() -> tuple[str, ...]:
    return tuple(sorted(_cards()))


def card_called(name: str) -> str:
    """Return the catalog's name of a card: "rtx4090" also for "RTX 4090". InputError with the nearest name."""
    return _own_name("card", name, card_names())


def card_facts(name: str) -> Mapping[str, Any]:
    """Return the entry of the card `name` in the catalog; InputError with the nearest name if there is none."""
    facts: Mapping[str, Any] = _cards()[card_called(name)]
    return facts


def known_card(name: str) -> Accelerator:
    """Return the known card `name`, e.g. "rtx4090", with the rates that eager PyTorch is assumed to reach on it.

    InputError with the nearest name if there is none.
    """
    facts = card_facts(name)
    return Accelerator(
        name=facts["title"],
        kind="simulated",
        bytes=facts["bytes"],
        compute_capability=facts["compute_capability"],
        link_rate=facts["link_rate"],
        exchange_rate=_exchange_rate(facts),
        exchange_latency=EXCHANGE_LATENCY,
        streamed_overhead=STREAMED_OVERHEAD,
        resident_overhead=RESIDENT_OVERHEAD,
        **rates(facts),
        **host_rates(),
    )


def _exchange_rate(facts: Mapping[str, Any]) -> float:
    """Bytes per second that a card sends to the others of its computer while it receives as much."""
    nvlink: float | None = facts.get("nvlink_rate")
    return THROUGH_HOST_SHARE * float(facts["link_rate"]) if nvlink is None else NVLINK_SHARE * nvlink


def _own_name(what: str, name: str, names: Sequence[str]) -> str:
    """The one of `names` that equals `name`, ignoring punctuation and case."""
    alike = [own for own in names if _plain(own) == _plain(name)]
    if not alike:
        raise InputError(unknown_name(what, name, names), name=name)
    return alike[0]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
