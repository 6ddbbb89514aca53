"""Which CUDA cards there are, on which of them torch can compute, and if it cannot, why."""

from __future__ import annotations

import re
import warnings

import torch

__all__ = ["cuda_count", "unusable_card", "usable_cards"]

ELSEWHERE = "https://pytorch.org/get-started/locally/"  # where torch for other CUDA versions is


def cuda_count() -> int:
    """The number of cards that torch can compute on."""
    return len(usable_cards())


def usable_cards() -> tuple[int, ...]:
    """The indices of the cards that torch can compute on."""
    with warnings.catch_warnings(action="ignore"):  # torch's own warning of what `unusable_card` says
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(index for index in range(count) if _missing_kernels(index) is None)


def unusable_card() -> str | None:
    """Why torch cannot compute on the card that is there, and what to do. None if it can, or if there is no card."""
    if torch.version.cuda is None or usable_cards():
        return None
    return _missing_kernels(0) if torch.cuda.is_available() else _driver_error()


def _driver_error() -> str | None:
    """Why CUDA does not start, though a driver is there: mostly it is older than torch's CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        if reason.startswith(("Found no NVIDIA driver", "No CUDA GPUs are available")):
            return None
        if found := re.search(r"too old \(found version (\d+)\)", reason):
            there = f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
            return (
                f"the NVIDIA driver is too old for torch {torch.__version__}: it supports CUDA {there}, torch needs "
                f"{torch.version.cuda}. Update the driver, or install torch for CUDA {there} or older: {ELSEWHERE}"
            )
        return f"torch {torch.__version__} cannot use the NVIDIA card: {reason}"
    return None


def _missing_kernels(index: int) -> str | None:
    """Why this torch has no kernels for card `index`; None if it has."""
    built = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in torch.cuda.get_arch_list()]
    capability = torch.cuda.get_device_capability(index)
    made_for = [(each[1], (int(each[2]), int(each[3]))) for each in built if each]
    if not made_for or any(_runs(kind, version, capability) for kind, version in made_for):
        return None
    versions = ", ".join(f"{major}.{minor}" for _, (major, minor) in made_for)
    major, minor = capability
    return (
        f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(index)}, which has compute "
        f"capability {major}.{minor}: only for {versions}. Install torch for an older CUDA version: {ELSEWHERE}"
    )


def _runs(kind: str, version: tuple[int, int], capability: tuple[int, int]) -> bool:
    """Whether a card of this capability runs what was compiled for `version`: PTX ("compute") also on later ones."""
    return version <= capability and (kind == "compute" or version[0] == capability[0])
