"""One call on several devices → one Trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tightfit.measure.recorder import Recorder
from tightfit.schema.results import PhaseTrace, Trace

__all__ = ["JointRecorder"]


@dataclass
class JointRecorder(Recorder):
    """A Recorder of the pipeline's main device, with the Recorders of other devices in `others`, by device name."""

    others: dict[str, Recorder] = field(default_factory=dict)

    def of(self, name: str) -> Recorder:
        """Return the Recorder of the device `name`."""
        return self.others.get(name, self)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        with contextlib.ExitStack() as calls:
            for other in self.others.values():
                calls.enter_context(other.call())
            calls.enter_context(super().call())
            yield

    def enter(self, phase: str) -> None:
        for other in self.others.values():
            other.enter(phase)
        super().enter(phase)

    def leave(self) -> None:
        for other in self.others.values():
            other.leave()
        super().leave()

    def trace(self) -> Trace:
        others = {name: other.trace() for name, other in self.others.items()}
        trace = super().trace()
        phases = [_joined(phase, {n: o.phases[i] for n, o in others.items()}) for i, phase in enumerate(trace.phases)]
        notes = [*trace.notes, *(note for other in others.values() for note in other.notes)]
        lossy = [*trace.lossy, *(what for other in others.values() for what in other.lossy)]
        return trace.model_copy(
            update={"phases": tuple(phases), "notes": tuple(dict.fromkeys(notes)), "lossy": tuple(dict.fromkeys(lossy))}
        )


def _joined(phase: PhaseTrace, others: Mapping[str, PhaseTrace]) -> PhaseTrace:
    """Sum transfers and waiting time over all devices; record the peaks of the other devices by name."""
    every = [phase, *others.values()]
    return phase.model_copy(
        update={
            "other_devices": {name: other.peak_bytes for name, other in others.items()},
            "bytes_in": sum(each.bytes_in for each in every),
            "bytes_out": sum(each.bytes_out for each in every),
            "on_demand": sum(each.on_demand for each in every),
            "seconds_waiting": sum(each.seconds_waiting for each in every),
        }
    )
