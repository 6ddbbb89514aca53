"""What ran out of memory is run again only if its inputs are as they were, and none of them is kept alive for that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tightfit.apply.weights.oom_retry import retry_on_oom


class Once:
    """Runs out of memory the first time, after `change` was done to what is given."""

    def __init__(self, change: Callable[..., object] = lambda *_: None) -> None:
        self.calls, self._change = 0, change

    def __call__(self, hidden: torch.Tensor, caches: list[Any]) -> int:
        self.calls += 1
        if self.calls == 1:
            self._change(hidden, caches)
            raise torch.OutOfMemoryError("injected")
        return self.calls


def given() -> tuple[torch.Tensor, list[Any]]:
    return torch.zeros(3), [torch.ones(2), None, 0]


def test_it_runs_again() -> None:
    assert retry_on_oom(Once(), lambda: True)(*given()) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda hidden, caches: hidden.add_(1),
        lambda hidden, caches: caches[0].add_(1),
        lambda hidden, caches: caches.__setitem__(0, torch.ones(2)),
        lambda hidden, caches: caches.__setitem__(1, torch.ones(2)),
        lambda hidden, caches: caches.__setitem__(2, 1),
        lambda hidden, caches: caches.append(4),
        lambda hidden, caches: caches.clear(),
    ],
)
def test_what_was_changed_is_not_done_again(change: Callable[..., object]) -> None:
    """Autoencoders of video count on in a list, and keep the last frames in it."""
    once = Once(change)
    with pytest.raises(torch.OutOfMemoryError):
        retry_on_oom(once, lambda: True)(*given())
    assert once.calls == 1


def test_nothing_is_kept_alive() -> None:
    """What a block takes out of a list of caches is gone at once, as it is where nobody watches."""
    hidden, caches = given()
    old = weakref.ref(caches[0])

    def replace(hidden: torch.Tensor, caches: list[Any]) -> bool:
        caches[0] = None
        gc.collect()
        return old() is None

    assert retry_on_oom(replace, lambda: False)(hidden, caches)
