"""One item of a batch at a time through an autoencoder: the peak of one picture, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tightfit.apply.activations.outputs import combine, take_apart

__all__ = ["sliced"]


def sliced(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` (an autoencoder's `encode` or `decode`), run item by item over its first dimension.

    Where that holds the frames of clips, which belong together (their number is told as `num_frames`), all at once;
    so too what gives one number for all items, a loss for instance, which is seen at the first.
    """

    def run(whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        count = whole.shape[0]
        if count == 1 or kwargs.get("num_frames", 1) != 1:
            return method(whole, *args, **kwargs)

        def item(value: Any, index: int) -> Any:
            goes_along = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == count
            return value[index : index + 1] if goes_along else value

        def output(index: int) -> Any:
            others = {key: item(value, index) for key, value in kwargs.items()}
            return method(whole[index : index + 1], *(item(value, index) for value in args), **others)

        first = output(0)
        if any(tensor.ndim == 0 for tensor in take_apart(first)[0]):
            return method(whole, *args, **kwargs)
        return combine([first, *map(output, range(1, count))], torch.cat)

    return run
