"""On a real card: the same pictures as with everything resident, at lower peaks, and nothing left behind."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from inspection import assert_same, imprint, relative_error
from tightfit import fit
from tightfit.catalog.cuda import KEEPS_WORKSPACE, workspace_bytes
from tightfit.devices.choose import choose_device, find_machine
from tightfit.devices.cuda_support import cuda_count
from tightfit.measure.rates import device_rates
from tightfit.run.planning_context import measured_machine
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]


def test_streaming_lowers_the_allocators_peak() -> None:
    case = next(case for case in CASES if case.name == "StableDiffusionXL")
    pipe, peaks = case.make(), []
    for level in (0, 0, 3):
        fitted = fit(pipe, level=level, device="cuda")
        run(pipe, case)
        peaks.append(fitted.report().trace.peak_bytes)
        fitted.undo()
        torch.cuda.empty_cache()
    passing = 0 if KEEPS_WORKSPACE else workspace_bytes(find_machine().accelerators[0].compute_capability)
    beside = torch.cuda.memory_allocated() + passing  # other tests', and cuBLAS's workspace
    assert beside < peaks[1]
    assert peaks[2] - beside < 0.8 * (peaks[1] - beside)


def test_fp8_on_the_card() -> None:
    case = next(case for case in CASES if case.name == "Flux")
    pipe = case.make()
    run(pipe, case)  # transformers installs hooks of its own at the first call
    before = imprint(pipe)
    fit(pipe, level=0, device="cuda")
    plain = run(pipe, case).cpu()
    fitted = fit(
        pipe, plan={"components": {"transformer": {"storage": "float8_e4m3fn", "placement": "stream"}}}, device="cuda"
    )
    assert 0 < relative_error(run(pipe, case).cpu(), plain) < 0.3
    fitted.undo()
    assert_same(before, imprint(pipe))


def test_products_of_large_matrices_have_numbers() -> None:
    layer, rows = torch.nn.Linear(1024, 4096), torch.randn(608, 1024)
    with torch.no_grad():
        wanted = layer(rows)
        found = layer.to("cuda")(rows.to("cuda")).cpu()
    assert relative_error(found, wanted) < 1e-4


def test_snapshot_is_written(tmp_path) -> None:
    device = choose_device("cuda")
    device.check_history()
    device.record_history()
    torch.ones(1000, device=device.torch_device)
    device.write_snapshot(tmp_path / "snapshot.pickle")
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0


def seconds_of_matmul(name: str, side: int) -> float:
    left, right = (torch.randn(side, side, device=name, dtype=torch.float16) for _ in range(2))
    device = choose_device(name)
    return statistics.median(device.seconds(lambda: [left @ right for _ in range(50)]) / 50 for _ in range(9))


def test_the_machine_has_the_cards() -> None:
    taken = torch.ones(1, device="cuda")
    machine = find_machine()
    assert 0 < machine.ram_free <= machine.ram
    assert 0 < machine.pinnable <= machine.ram
    assert len(machine.accelerators) == cuda_count()
    for card in machine.accelerators:
        assert (card.kind, card.product_name) == ("cuda", torch.cuda.get_device_name(card.name))
        assert card.compute_capability == "{}.{}".format(*torch.cuda.get_device_capability(card.name))
        assert 0 < card.free <= card.bytes
    assert machine.accelerators[0].free <= machine.accelerators[0].bytes - taken.nbytes


def test_the_multiprocessors_are_those_of_the_driver_and_go_into_the_cards_terms() -> None:
    device = choose_device("cuda")
    known, told = device.multiprocessors(), torch.cuda.get_device_properties(0)
    assert known is not None
    assert (known.number, known.cache_bytes) == (told.multi_processor_count, told.L2_cache_size)
    assert 5e8 < known.clock < 5e9
    found, notes = device_rates(device, 0.5, lambda name: None)
    assert notes == []
    assert (found["multiprocessors"], found["cache_bytes"]) == (known.number, known.cache_bytes)
    assert found["tail"] > 0
    assert {"efficient-attention.float16", "efficient-attention.bfloat16"} <= found["arithmetic_rates"].keys()


@pytest.mark.realtime
def test_the_measured_machine_has_the_cards_rates(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begun = time.perf_counter()
    machine = measured_machine()
    assert time.perf_counter() - begun < 20
    for card in machine.accelerators:
        assert 1e12 < card.arithmetic_rates["matmul.float16"] < 1e16
        assert card.arithmetic_rates["matmul.float16"] >= 0.8 * card.arithmetic_rates["matmul.float32"]
        assert 1e8 < card.link_rate < card.memory_rate < 1e14
        assert 1e8 < card.link_rate_out < card.memory_rate
        assert 1e-7 < card.launch_overhead < 1e-3
        assert 1 / 6 < seconds_of_matmul(card.name, 2048) / (2 * 2048**3 / card.arithmetic_rates["matmul.float16"]) < 6
    assert measured_machine().accelerators[0].arithmetic_rates == machine.accelerators[0].arithmetic_rates
