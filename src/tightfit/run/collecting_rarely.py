"""A context in which Python's garbage collector runs rarely: simulations make many objects and no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from tightfit.devices.memory import trim_heap
from tightfit.run.garbage import raised_threshold

__all__ = ["collecting_rarely"]


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Raise the garbage collector's threshold. In the end the simulated pipeline is freed.

    Existing objects are frozen meanwhile: libraries have a million of them.
    """
    frozen = gc.get_freeze_count()
    with raised_threshold():
        if not frozen:  # unfreeze would also undo an earlier freeze by other code
            gc.freeze()
        try:
            yield
        finally:
            gc.collect()
            trim_heap()
            if not frozen:
                gc.unfreeze()
