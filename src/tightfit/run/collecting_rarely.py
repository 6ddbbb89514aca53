"""A context in which Python's garbage collector runs rarely: simulations make many objects and no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from tightfit.devices.memory import trim_heap

__all__ = ["collecting_rarely"]


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Raise the garbage collector's threshold tenfold: collections took up to a third of the time.

    Existing objects are frozen meanwhile: libraries have a million of them. In the end the simulated pipeline is freed.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(10 * before[0], *before[1:])
    if not frozen:  # unfreeze would also undo an earlier freeze by other code
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        trim_heap()
        if not frozen:
            gc.unfreeze()
        gc.set_threshold(*before)
