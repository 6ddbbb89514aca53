"""The meter and the recorder, on operations whose bytes are known."""

from __future__ import annotations

import gc
import signal

import pytest
import torch

from tightfit.devices.device import CpuDevice, LoopbackDevice
from tightfit.measure.meter import TensorMeter
from tightfit.measure.recorder import MAX_SAMPLES, Recorder

MIB = 2**20


class Counter:
    def __init__(self) -> None:
        self.now = self.most = 0

    def change(self, difference: int) -> None:
        self.now += difference
        self.most = max(self.most, self.now)


@pytest.fixture
def counter() -> Counter:
    return Counter()


def test_what_operations_make_counts_until_it_dies(counter: Counter) -> None:
    weight = torch.ones(512, 512)
    with TensorMeter(counter.change) as meter:
        first = weight + 1
        second = first * 2
        assert counter.now == 2 * MIB
        del first
        meter.settle()
        assert counter.now == MIB
        del second
        third = weight + 2  # as large as the second was, and in its place
        assert counter.now == MIB
        del third
    meter.settle()
    assert counter.now == 0
    assert counter.most == 2 * MIB


def test_views_and_older_tensors_do_not_count(counter: Counter) -> None:
    weight = torch.ones(512, 512)
    with TensorMeter(counter.change) as meter:
        views = [weight.t(), weight[3:], weight.view(-1), weight.detach()]
        new = weight + 1
        views += [new.t(), new[1:], new.reshape(-1)]
        assert counter.now == MIB
        weight.add_(1)
        assert counter.now == MIB
        del new
        meter.settle()
        assert counter.now == MIB  # its views are alive
        views.clear()
        meter.settle()
        assert counter.now == 0


def test_what_outlives_the_meter_is_told_when_it_dies(counter: Counter) -> None:
    with TensorMeter(counter.change) as meter:
        kept = torch.ones(512, 512)
    assert counter.now == MIB
    del kept
    meter.settle()
    assert counter.now == 0


def test_an_interrupt_is_never_swallowed(counter: Counter) -> None:
    """Python drops what is raised in a weak reference's callback; the meter's callbacks run no Python."""

    def work(delay: float) -> None:
        with TensorMeter(counter.change):
            signal.setitimer(signal.ITIMER_REAL, delay)
            torch.stack([torch.ones(8) + 1 for _ in range(20_000)])

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    gc.disable()  # hypothesis listens to collections with a Python function, and what is raised in one is dropped too
    try:
        for trial in range(100):
            with pytest.raises(KeyboardInterrupt):
                work(0.001 + trial * 1e-5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def test_pauses_and_nested_lists(counter: Counter) -> None:
    meter = TensorMeter(counter.change)
    with meter:
        with meter.paused():
            unseen = torch.ones(512, 512)
        parts = unseen.split(256)
        assert counter.now == 0
        whole = torch.cat([*parts, *parts])
        assert counter.now == 2 * MIB
    assert whole.shape == (1024, 512)


def test_shapes_have_no_bytes(counter: Counter) -> None:
    with TensorMeter(counter.change) as meter:
        shapes = [torch.empty(512, 512, device="meta")]
        shapes += [shapes[0] + 1, shapes[0].to(torch.float16), torch.ones(512, 512).to("meta")]
        meter.settle()
        assert counter.now == 0
        assert len(shapes) == 4
    assert counter.most == MIB  # ones, for a moment


@pytest.mark.parametrize("inference", [False, True])
def test_what_may_be_a_copy_counts_if_it_is_one(inference: bool, counter: Counter) -> None:
    weight = torch.ones(512, 512)
    with torch.inference_mode(inference), TensorMeter(counter.change):
        same = [weight.contiguous(), weight.reshape(-1), weight.to(torch.float32), weight.movedim(0, 1)]
        assert counter.now == 0
        copies = [weight.t().contiguous(), weight.t().reshape(-1), weight.to(torch.float64)]
        assert counter.now == 4 * MIB
        assert len(same) == 4
        assert len(copies) == 3


def test_phases_peaks_and_weights() -> None:
    recorder = Recorder(LoopbackDevice())
    recorder.weights_changed(100)
    with recorder.call():
        recorder.enter("encode")
        prompt = torch.ones(256, 1024)
        recorder.leave()
        recorder.enter("denoise")
        recorder.weights_changed(3 * MIB)
        recorder.moved(bytes_in=3 * MIB)
        big = torch.ones(1024, 1024)
        del big
        recorder.weights_changed(-3 * MIB)
        recorder.enter("denoise")
        trace = recorder.trace()
    encode, denoise = trace.phases
    assert (encode.name, encode.peak_bytes, encode.peak_weights, encode.runs) == ("encode", MIB + 100, 100, 1)
    assert (denoise.peak_bytes, denoise.peak_weights) == (MIB + 4 * MIB + 3 * MIB + 100, 3 * MIB + 100)
    assert (denoise.bytes_in, denoise.bytes_out, denoise.runs) == (3 * MIB, 0, 2)
    assert trace.peak_bytes == denoise.peak_bytes
    assert trace.samples[-1].weights == 100
    assert prompt.numel()


def test_samples_stay_few_and_keep_the_peak() -> None:
    recorder = Recorder(CpuDevice())
    with recorder.call():
        recorder.enter("denoise")
        for step in range(3 * MAX_SAMPLES):
            recorder.weights_changed(10_000 if step == 5000 else 1)
            recorder.weights_changed(-10_000 if step == 5000 else -1)
        trace = recorder.trace()
    assert len(trace.samples) <= MAX_SAMPLES + 1
    assert max(sample.weights for sample in trace.samples) == 10_000


def test_nothing_is_recorded_between_calls() -> None:
    recorder = Recorder(CpuDevice())
    recorder.enter("encode")
    recorder.moved(bytes_in=5)
    with recorder.call():
        assert recorder.trace().phases == ()
