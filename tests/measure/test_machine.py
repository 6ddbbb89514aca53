"""This computer as a Machine: what it has, what it reaches, and how that is kept and told."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from simulator.conftest import ACCELERATOR
from tightfit import cli, fit
from tightfit.catalog.known import known_card
from tightfit.devices import choose as choice
from tightfit.devices import device as seam
from tightfit.devices import ram
from tightfit.devices.choose import choose_device, find_machine
from tightfit.devices.device import CpuDevice, LoopbackDevice
from tightfit.devices.ram import pinnable_bytes, ram_bytes, ram_free, ram_limit
from tightfit.files import cache_folder
from tightfit.measure import host_rates, rates
from tightfit.measure.disk_rate import disk_rate
from tightfit.measure.equal_cards import with_equal_rates
from tightfit.measure.kept_rates import known_accelerator
from tightfit.measure.rates import Work, device_rates, measure_rates, timed
from tightfit.report.machine import describe_machine
from tightfit.run import planning_context as machines
from tightfit.run.planning_context import measured_machine
from tightfit.schema.kernel_time import kernel_seconds
from tightfit.schema.machine import Accelerator, Amounts, Machine
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host

KINDS, DTYPES = ("matmul", "convolution", "attention"), ("float32", "float16", "bfloat16")
GIB = 2**30
CPU = Accelerator(name="cpu", kind="cpu", bytes=GIB)
TOTAL = psutil.virtual_memory().total

pytestmark = pytest.mark.skipif(choose_device().kind != "cpu", reason="these are of a computer without a card")


class Measured(NamedTuple):
    machine: Machine
    seconds: float
    told: list[tuple[str, int, int]]
    cache: Path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """This computer, measured as `tightfit machine` does it. Once: it takes a dozen seconds."""
    cache, told = tmp_path_factory.mktemp("cache"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        start, drawn = time.perf_counter(), torch.get_rng_state()
        machine = measured_machine(on_progress=lambda *step: told.append(step))
        assert torch.equal(torch.get_rng_state(), drawn), "it draws none of the user's random numbers"
        return Measured(machine, time.perf_counter() - start, told, cache)


# what is measured


def test_every_rate_is_there_and_it_took_less_than_20_seconds(measured: Measured) -> None:
    (cpu,) = measured.machine.accelerators
    assert set(cpu.arithmetic_rates) == {f"{kind}.{dtype}" for kind in KINDS for dtype in DTYPES}
    assert all(1e6 < rate < 1e15 for rate in cpu.arithmetic_rates.values())
    assert 1e8 < cpu.memory_rate < 1e13
    assert 1e-7 < cpu.launch_overhead < 1e-2
    assert set(cpu.channels_last_gains) == {"denoiser.float32", "autoencoder.float32"}
    assert all(0.2 < gain < 5 for gain in cpu.channels_last_gains.values())
    assert (cpu.link_rate, cpu.link_rate_out) == (None, None)
    assert 1e5 < measured.machine.disk_rate < 1e12
    assert measured.seconds < 20


def test_the_steps_are_told_in_order(measured: Measured) -> None:
    names, done, totals = zip(*measured.told, strict=True)
    assert names[0] == "cpu: matmul.float32"
    assert names[-2:] == ("disk", "done")
    assert done == tuple(range(len(names)))
    assert set(totals) == {done[-1]}


def work(kind: str) -> tuple[Callable[[], object], int]:
    """Work of other shapes than those that are measured, and its operations."""
    match kind:
        case "matmul":
            left, right = torch.randn(512, 2048), torch.randn(2048, 1024)
            return lambda: left @ right, 2 * 512 * 2048 * 1024
        case "convolution":
            picture, weight = torch.randn(1, 128, 96, 96), torch.randn(192, 128, 3, 3)
            return lambda: F.conv2d(picture, weight, padding=1), 2 * 9 * 128 * 192 * 96 * 96
    query = torch.randn(2, 8, 700, 64)
    return lambda: F.scaled_dot_product_attention(query, query, query), 4 * 2 * 8 * 700**2 * 64


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_explains_the_time_of_other_work(kind: str, measured: Measured) -> None:
    run, operations = work(kind)
    run()
    taken = statistics.median(CpuDevice().seconds(run) for _ in range(7))
    rate = measured.machine.accelerators[0].arithmetic_rate(kind, "float32")
    assert rate is not None
    assert 1 / 6 < taken / (operations / rate) < 6


@pytest.mark.slow
def test_a_simulated_cards_rates_are_those_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MOST_RUNS", 3)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)  # time enough for the largest work
    like = ACCELERATOR.model_copy(update={"arithmetic_rates": {"float32": 50e12, "attention.bfloat16": 90e12}})
    use_cards([SimulatedCard(0, like, Host(), "shapes")])
    found, notes = device_rates(choose_device("simulated:0"), 0.5, lambda name: None)
    card = Accelerator(name="measured", kind="simulated", bytes=1, **found)
    for kind, dtype in itertools.product(KINDS, DTYPES):
        assert card.arithmetic_rate(kind, dtype) == pytest.approx(like.arithmetic_rate(kind, dtype), rel=0.01)
    assert 0.49 < card.link_rate / like.link_rate < 1.01  # half where host memory is pageable to it
    assert card.launch_overhead == pytest.approx(like.launch_overhead, rel=0.01)
    assert 0.6 < card.memory_rate / like.memory_rate < 1.01  # it counts what is copied to as read, too
    assert [note.partition(" not measured: ")[0] for note in notes] == ["simulated:0: link rate out"]  # has no numbers


# what kernels of the transformers and U-Nets of models compute and move
KERNELS = {
    "product": ("matmul", Amounts(2 * 4608 * 3072 * 12288, 220 * 10**6, tile_operations=2 * 128 * 128 * 3072)),
    "small product": ("matmul", Amounts(2 * 154 * 1536 * 1536, 6 * 10**6, tile_operations=2 * 128 * 128 * 1536)),
    "attention": ("attention", Amounts(4 * 24 * 4608**2 * 128, 113 * 10**6, exponentials=24 * 4608**2)),
    "narrow heads": ("attention", Amounts(4 * 10 * 4096**2 * 64, 21 * 10**6, exponentials=10 * 4096**2)),
    "with a mask": ("efficient-attention", Amounts(4 * 24 * 4608**2 * 128, 113 * 10**6, exponentials=24 * 4608**2)),
    "convolution": ("convolution", Amounts(2 * 9 * 640**2 * 64**2, 18 * 10**6, tile_operations=2 * 128 * 128 * 5760)),
    "norm": ("normalization", Amounts(0, 10**6, serial=10 * 128**2)),
    "modulation": ("memory", Amounts(0, 85 * 10**6, divisions=2 * 4096 * 3072)),
    "in the cache": ("memory", Amounts(0, 8 * 10**6)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["rtx4090", "a100", "h100", "t4"])
def test_a_known_card_measured_takes_the_time_of_the_known_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MOST_RUNS", 3)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    known = known_card(name)
    use_cards([SimulatedCard(0, known, Host(), "shapes")])
    found, _ = device_rates(choose_device("simulated:0"), 0.5, lambda name: None)
    assert found.keys() <= set(machines._RATES), "so all of it is kept"
    card = Accelerator(name="measured", kind="simulated", bytes=1, **found)
    for what, (kind, amounts) in KERNELS.items():
        here, nominal = (kernel_seconds(each, kind, "float16", amounts) for each in (card, known))
        assert here == pytest.approx(nominal, rel=0.03), what
    plain = Accelerator(name="plain", kind="simulated", bytes=1, arithmetic_rates=card.arithmetic_rates)
    kind, amounts = KERNELS["small product"]
    assert kernel_seconds(plain, kind, "float16", amounts) < 0.7 * kernel_seconds(known, kind, "float16", amounts)


def test_the_hosts_seconds_are_for_the_kernels_and_calls_of_modules_that_there_are() -> None:
    known = known_card("rtx4090")
    use_cards([card := SimulatedCard(0, known, Host(), "shapes")])
    launched, called = list[object](), list[object]()
    device = choose_device("simulated:0")
    blocks = host_rates._Blocks().eval().to(device.torch_device)
    operations = host_rates._Operations(device.torch_device)
    card.kernel_callbacks.append(launched.append)
    operations()
    assert len(launched) == host_rates.KERNELS_OF_OPERATIONS
    launched.clear()
    with torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: called.append(None)):
        blocks()
    assert (len(launched), len(called)) == (host_rates.KERNELS_OF_BLOCKS, host_rates.CALLS_OF_BLOCKS + 1)  # + itself
    found = host_rates.host_overheads(device, 0.0)
    assert found["launch_overhead"] == pytest.approx(known.launch_overhead, rel=0.01)
    assert found["module_overhead"] == pytest.approx(known.module_overhead, rel=0.05)


def test_a_link_is_measured_in_both_directions() -> None:
    found, notes = device_rates(LoopbackDevice(), 0.2, lambda name: None)
    assert notes == []
    assert 1e8 < found["link_rate"] < 1e13
    assert 1e8 < found["link_rate_out"] < 1e13


def test_what_a_device_cannot_do_is_noted_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    convolve = F.conv2d

    def refuse(picture: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if picture.dtype == torch.bfloat16:
            raise RuntimeError("no kernel\nfor bfloat16 here")
        return convolve(picture, *rest, **more)

    monkeypatch.setattr(rates.F, "conv2d", refuse)
    found, notes = device_rates(CpuDevice(), 0.1, lambda name: None)
    assert notes == ["cpu: convolution.bfloat16 not measured: no kernel"]
    assert len(found["arithmetic_rates"]) == len(KINDS) * len(DTYPES) - 1


# how long is measured


class Clock:
    """A clock that only work moves, and a device that goes by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
        self.time, self.sizes, self.smallest = 0.0, set[int](), seconds
        self.hiccups: Iterator[float] = itertools.repeat(0.0)
        monkeypatch.setattr(time, "perf_counter", lambda: self.time)

    def make(self, size: int) -> Work:
        self.sizes.add(size)
        return Work(lambda: self._pass(self.smallest * 4**size), Amounts(0, 4**size))

    def _pass(self, seconds: float) -> None:
        self.time += seconds + next(self.hiccups)


@pytest.mark.parametrize(("seconds", "largest"), [(1e-5, 5), (1e-3, 3), (0.02, 1), (0.2, 0), (5.0, 0)])
def test_work_grows_while_there_is_time(seconds: float, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, seconds=seconds)
    work, taken = timed(CpuDevice(), clock.make, 1.0)
    assert work.rate(taken, CPU) == pytest.approx(1 / seconds)
    assert clock.sizes == set(range(largest + 1))
    assert clock.time < 1.6 or (largest == 0 and clock.time <= 6 * seconds)


def test_the_median_does_not_see_a_few_hiccups(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, seconds=0.01)
    clock.hiccups = itertools.cycle([0.0, 0.0, 0.0, 0.0, 0.15])
    work, taken = timed(CpuDevice(), clock.make, 3.0)
    assert work.rate(taken, CPU) == pytest.approx(100)


def test_without_the_hosts_seconds_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> dict[str, float]:
        raise RuntimeError("cuDNN is missing")

    monkeypatch.setattr(rates, "host_overheads", refuse)
    found, notes = device_rates(CpuDevice(), 0.1, lambda name: None)
    assert notes == ["cpu: launches not measured: cuDNN is missing"]
    assert len(found["arithmetic_rates"]) == len(KINDS) * len(DTYPES)


def test_the_hosts_seconds_are_the_same_for_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards of one kind differed by what was measured of the host, and a pipeline was divided among them."""
    measured = {
        "first": {"launch_overhead": 5e-6, "module_overhead": 1.2e-5, "resident_overhead": 4e-6},
        "second": {"launch_overhead": 4e-6, "module_overhead": 3e-5, "resident_overhead": 0.0},
    }
    cards = [Accelerator(name=name, kind="cuda", bytes=GIB, **found) for name, found in measured.items()]
    monkeypatch.setattr(machines, "choose_device", lambda name: LoopbackDevice())
    overheads = iter([(2e-5, 4e-6), (1e-5, 0.0)])
    monkeypatch.setattr(machines, "layer_overheads", lambda *_: next(overheads))
    machine = machines._with_overheads(Machine(accelerators=tuple(cards), ram=GIB, cores=1))
    for card in machine.accelerators:
        assert [getattr(card, field) for field in machines._OVERHEADS] == [4e-6, 1.2e-5, 1e-5, 4e-6]


def test_equal_cards_have_the_same_rates_but_for_a_link_of_half_the_lanes() -> None:
    """The first was disturbed while its arithmetic was measured; the third has fewer lanes; the last is another."""
    both = {"float32": 5e12, "int8": 1e13}
    measured: list[dict[str, Any]] = [
        {"product_name": "A", "link_rate": 24e9, "memory_rate": 9e11, "arithmetic_rates": {"float32": 4e12}},
        {
            "product_name": "A",
            "link_rate": 25e9,
            "memory_rate": 8e11,
            "arithmetic_rates": {"float32": 5e12, "int8": 1e13},
        },
        {"product_name": "A", "link_rate": 12e9, "memory_rate": 9e11, "arithmetic_rates": {"float32": 5e12}},
        {"product_name": "B", "link_rate": 25e9, "memory_rate": 7e11, "arithmetic_rates": {"float32": 3e12}},
    ]
    cards = tuple(Accelerator(name=f"cuda:{i}", kind="cuda", bytes=GIB, **its) for i, its in enumerate(measured))
    found = with_equal_rates(Machine(accelerators=cards, ram=GIB, cores=1)).accelerators
    assert [card.link_rate for card in found] == [25e9, 25e9, 12e9, 25e9]
    assert [card.link_rate_out for card in found] == [None] * 4
    assert [card.memory_rate for card in found] == [9e11, 9e11, 9e11, 7e11]
    assert [card.arithmetic_rates for card in found[:3]] == [both] * 3
    assert found[3] == cards[3]


def test_others_at_work_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "device_rates", lambda *_: ({}, []))
    monkeypatch.setattr(rates, "layout_gains", lambda *_: ({}, []))
    monkeypatch.setattr(rates, "disk_rate", lambda *_: 1e9)
    said = "other programs took 40% of the processors meanwhile, which lowers rates"
    for share, notes in ((0.4, (said,)), (0.1, ())):
        monkeypatch.setattr(rates, "_others", lambda share=share: lambda: share)
        assert measure_rates(find_machine(), tmp_path).notes == notes


# the disk


def test_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    assert 1e5 < disk_rate(tmp_path, 0.4) < 1e12
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["fsync", "posix_fadvise"])
def test_an_interruption_leaves_nothing_on_the_disk(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        disk_rate(tmp_path, 0.4)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_too_little_room_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(GIB, GIB - 10**8, 10**8))
    monkeypatch.setattr(rates, "device_rates", lambda *_: ({}, []))
    monkeypatch.setattr(rates, "layout_gains", lambda *_: ({}, []))
    monkeypatch.setattr(rates, "_others", lambda: lambda: 0.0)
    machine = measure_rates(find_machine(), tmp_path)
    assert machine.disk_rate is None
    assert machine.notes == (
        "disk: not measured: the disk has 95.4 MiB of room, and a file of 256 MiB should not crowd it",
    )


# what is kept

GAINS = {"channels_last_gains": {"denoiser.float32": 1.5}}


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """One item for each measurement, which is a quick one here; the cache is empty."""
    calls: list[Machine] = []

    def quick(machine: Machine, folder: Path, told: Any) -> Machine:
        cards = [
            card.model_copy(
                update={"memory_rate": 1e9 + len(calls), "arithmetic_rates": {"matmul.float32": 7.5}} | GAINS
            )
            for card in machine.accelerators
        ]
        calls.append(machine.model_copy(update={"accelerators": tuple(cards), "disk_rate": 2e9, "notes": ("slow",)}))
        return calls[-1]

    monkeypatch.setattr(machines, "measure_rates", quick)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return calls


def kept_rates(machine: Machine) -> Any:
    return machine.disk_rate, machine.notes, [card.model_copy(update={"free": 0}) for card in machine.accelerators]


def test_rates_are_measured_once(count: list[Machine]) -> None:
    first, second = measured_machine(), measured_machine()
    assert len(count) == 1
    assert kept_rates(first) == kept_rates(second) == kept_rates(count[0])


def test_rates_are_measured_again_where_that_is_wanted(count: list[Machine]) -> None:
    taught = cache_folder() / "experiences" / "of-some-runs.json"
    taught.parent.mkdir(parents=True)
    taught.write_text("[]")
    measured_machine()
    assert taught.exists()
    again = measured_machine(again=True)
    assert not taught.exists()  # what runs taught stands on the rates
    assert len(count) == 2
    assert again.accelerators[0].memory_rate == 1e9 + 1
    assert kept_rates(measured_machine()) == kept_rates(again)


def test_what_is_free_is_asked_anew(count: list[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    measured_machine()
    monkeypatch.setattr(choice, "ram_free", lambda: 12345)
    monkeypatch.setattr(seam, "ram_free", lambda: 1234)
    machine = measured_machine()
    assert (machine.ram_free, machine.accelerators[0].free) == (12345, 1234)
    assert len(count) == 1


def test_what_is_known_of_a_device_is_what_was_kept_and_measures_nothing(
    count: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here,) = find_machine().accelerators
    bare = known_accelerator(CpuDevice())
    assert bare.model_copy(update={"free": None}) == here.model_copy(update={"free": None})
    measured_machine()
    assert known_accelerator(CpuDevice()).channels_last_gains == GAINS["channels_last_gains"]
    assert known_accelerator(LoopbackDevice()).channels_last_gains == {}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    assert known_accelerator(CpuDevice()).channels_last_gains == {}
    assert len(count) == 1


def test_a_layout_that_is_left_open_is_settled_by_what_was_kept(count: list[Machine]) -> None:
    choices = {"components": {"model": {"channels_last": "auto"}}}
    for measured in (False, True):
        network = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3))
        fitted = fit(network, plan=choices, device="cpu")
        assert fitted.plan.components["model"].channels_last is measured
        assert network[0].weight.is_contiguous(memory_format=torch.channels_last) is measured
        fitted.undo()
        assert network[0].weight.is_contiguous()
        measured_machine()


def test_what_is_known_of_a_simulated_card_is_what_it_was_given() -> None:
    like = ACCELERATOR.model_copy(update=GAINS)
    use_cards([SimulatedCard(0, like, Host(), "shapes")])
    assert known_accelerator(choose_device("simulated:0")) == like


@pytest.mark.parametrize(
    "changed", [{"cpu": "another"}, {"cores": 999}, {"accelerators": ({"name": "cpu", "kind": "cpu", "bytes": GIB},)}]
)
def test_another_computer_is_measured_apart(
    changed: dict[str, Any], count: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = find_machine()
    measured_machine()
    there = Machine.from_mapping({**here.to_mapping(), **changed})
    for machine, measurements in ((there, 2), (here, 2)):
        monkeypatch.setattr(machines, "find_machine", lambda machine=machine: machine)
        assert measured_machine().accelerators[0].bytes == machine.accelerators[0].bytes
        assert len(count) == measurements


def break_file(file: Path, how: str) -> None:
    kept = json.loads(file.read_text())
    (key,) = kept
    cut = {**kept[key], "accelerators": []}
    texts = {
        "cut short": file.read_text()[:-30],
        "another kind": "[1, 2]",
        "no machine": json.dumps({key: 3}),
        "an unknown field": json.dumps({key: {**kept[key], "colour": "red"}}),
        "no devices": json.dumps({key: cut}),
        "not a number": file.read_text().replace("7.5", "NaN"),
        "no text": "\udcff",
    }
    file.write_text(texts[how], errors="surrogateescape")


@pytest.mark.parametrize(
    "how", ["cut short", "another kind", "no machine", "an unknown field", "no devices", "not a number", "no text"]
)
def test_a_broken_file_is_no_answer(how: str, count: list[Machine], tmp_path: Path) -> None:
    measured_machine()
    break_file(tmp_path / "cache" / "tightfit" / "machine.json", how)
    assert kept_rates(measured_machine()) == kept_rates(count[1])
    measured_machine()
    assert len(count) == 2


def test_a_file_that_cannot_be_written_is_no_harm(count: list[Machine], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert measured_machine().disk_rate == measured_machine().disk_rate == 2e9
    assert len(count) == 2


# RAM and control groups


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process's control groups are looked for: there are none yet."""
    monkeypatch.setattr(ram, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(ram, "OWN_GROUPS", tmp_path / "own")
    return tmp_path / "cgroup"


def test_without_control_groups_the_computer_is_the_limit(groups: Path) -> None:
    assert ram_limit() is None
    assert ram_bytes() == TOTAL
    assert 0 < ram_free() < TOTAL


def test_a_limit_of_version_2(groups: Path) -> None:
    stat = "anon 100\ninactive_file 30000\nactive_file 4000\nslab 5"
    group(groups, max=10**6, current=500_000, stat=stat)
    assert ram_limit() == ram_bytes() == CpuDevice().total_bytes() == 10**6
    assert ram_free() == CpuDevice().free_bytes() == 10**6 - 500_000 + 34_000


def test_a_limit_of_version_1(groups: Path) -> None:
    stat = "cache 9\ninactive_file 1\ntotal_cache 9\ntotal_inactive_file 2000\ntotal_active_file 100"
    group(groups / "memory", limit_in_bytes=10**6, usage_in_bytes=600_000, stat=stat)
    assert (ram_limit(), ram_free()) == (10**6, 10**6 - 600_000 + 2100)


def test_groups_within_groups_limit_each_other(groups: Path) -> None:
    (groups.parent / "own").write_text("1:name=systemd:/x\n0::/user/job\n")
    group(groups / "user" / "job", max="max", current=1000, stat="anon 1000")
    group(groups / "user", max=3 * 10**6, current=2_900_000, stat="anon 1")
    group(groups, max=2 * 10**6, current=5, stat="anon 5")
    group(groups / "elsewhere", max=1, current=1, stat="anon 0")
    assert (ram_limit(), ram_free()) == (2 * 10**6, 100_000)


def test_a_group_that_is_used_up_has_nothing_free(groups: Path) -> None:
    group(groups, max=1000, current=1200, stat="anon 0")
    assert ram_free() == 0


def test_a_limit_above_the_ram_is_none(groups: Path) -> None:
    group(groups / "memory", limit_in_bytes=2**63 - 4096, usage_in_bytes=10**6, stat="anon 0")
    assert (ram_limit(), ram_bytes()) == (None, TOTAL)


# this computer


def test_this_computer_as_it_is(groups: Path) -> None:
    machine = find_machine()
    assert machine.cores == len(os.sched_getaffinity(0))
    assert (machine.ram, machine.ram_limit, machine.pinnable) == (TOTAL, None, 0)
    (cpu,) = machine.accelerators
    assert (cpu.name, cpu.kind, cpu.bytes, cpu.product_name) == ("cpu", "cpu", TOTAL, machine.cpu)
    assert 0 < machine.ram_free < TOTAL
    assert cpu.arithmetic_rates == {}


@pytest.mark.parametrize(("release", "system", "share"), [("6.8.0-generic", "Linux", 1), ("10", "Windows", 0.5)])
def test_windows_page_locks_half_of_the_ram(
    release: str, system: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram, "ram_free", lambda: 90)
    monkeypatch.setattr(ram, "ram_bytes", lambda: 100)
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(platform, "system", lambda: system)
    assert pinnable_bytes() == (90 if share == 1 else 50)
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert pinnable_bytes() == 50


def test_records_from_before_still_load() -> None:
    card = {"name": "cuda:0", "kind": "cuda", "bytes": 5}
    machine = Machine.from_mapping({"accelerators": [card], "ram": 1, "cores": 2})
    assert (machine.ram_free, machine.pinnable, machine.notes, machine.accelerators[0].free) == (None, None, (), None)


def test_gains_in_words() -> None:
    gains = {"denoiser.float32": 0.957, "autoencoder.float32": 1.139, "autoencoder.bfloat16": 1.5}
    card = CARD.model_copy(update={"channels_last_gains": gains})
    text = describe_machine(Machine(accelerators=(card,), ram=1, cores=1)).splitlines()
    start = next(index for index, line in enumerate(text) if "channels last" in line)
    assert text[start + 1].split() == ["in", "U-Nets", "0.96", "×", "not", "measured"]
    assert text[start + 2].split() == ["in", "autoencoders", "1.14", "×", "1.50", "×"]


# what is said

CARD = Accelerator(
    name="cuda:1", kind="cuda", bytes=24 * GIB, free=23 * GIB, product_name="NVIDIA GeForce RTX 4090",
    compute_capability="8.9", multiprocessors=128, clock=2.664e9,
    arithmetic_rates={"matmul.bfloat16": 1.5e14, "convolution.float16": 9.87e8, "efficient-attention.float16": 9e13},
    memory_rate=900 * GIB, link_rate=25 * GIB, launch_overhead=4.21e-6, streamed_overhead=1.62e-5,
    resident_overhead=4e-6,
)  # fmt: skip


def test_a_card_in_words() -> None:
    machine = Machine(
        accelerators=(CARD,), ram=64 * GIB, ram_free=50 * GIB, ram_limit=64 * GIB, pinnable=32 * GIB, cores=16,
        cpu="AMD Ryzen", notes=("disk: not\nmeasured",),
    )  # fmt: skip
    assert describe_machine(machine).splitlines() == [
        "AMD Ryzen, 16 cores",
        "",
        "  memory   total  free now",
        "  RAM     64 GiB    50 GiB",
        "  cuda:1  24 GiB    23 GiB",
        "",
        "RAM: a control group's limit is 64 GiB",
        "page-locked RAM: up to 32 GiB now",
        "disk: not measured",
        "",
        "cuda:1: NVIDIA GeForce RTX 4090, compute capability 8.9, 128 multiprocessors at 2.66 GHz",
        "",
        "  operations per second       float32       float16      bfloat16",
        "  matmul                 not measured  not measured         150 T",
        "  convolution            not measured         987 M  not measured",
        "  attention              not measured  not measured  not measured",
        "  attention with a mask  not measured          90 T  not measured",
        "",
        "memory 900 GiB/s, link 25 GiB/s in, 25 GiB/s out, 4.21 µs of the host for each operation, "
        "0 µs for each call of a module, 16.2 µs for each streamed layer, 4 µs for a resident one",
        "note: disk: not measured",
    ]


def test_a_record_that_nobody_measured_is_said_too() -> None:
    said = describe_machine(Machine(accelerators=(Accelerator(name="x", kind="cuda", bytes=1),), ram=1, cores=1))
    assert "a processor without a name, 1 core\n" in said
    assert "page-locked RAM: not asked" in said


def invoke(measured: Measured, *words: str) -> Any:
    result = CliRunner(env={"XDG_CACHE_HOME": str(measured.cache)}).invoke(cli.app, ["machine", *words])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result


def test_the_command_prints_a_table(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "measure_rates", None)  # what is kept is enough
    said = invoke(measured).stdout
    assert said.startswith(f"{measured.machine.cpu}, {measured.machine.cores} core")
    for word in ("RAM ", "disk: ", "matmul ", "convolution ", "attention ", "of the host", "page-locked RAM: none"):
        assert word in said
    assert "not measured" not in said


def test_json_is_the_machine(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "measure_rates", None)
    machine = Machine.from_text(invoke(measured, "--json").stdout.splitlines()[-1])
    assert kept_rates(machine) == kept_rates(measured.machine)
    assert machine.ram == measured.machine.ram


def test_again_measures_and_keeps(measured: Measured, count: list[Machine]) -> None:
    runner = CliRunner(env={"XDG_CACHE_HOME": str(os.environ["XDG_CACHE_HOME"])})
    for words, measurements in (([], 1), ([], 1), (["--refresh"], 2)):
        assert runner.invoke(cli.app, ["machine", *words]).exit_code == 0
        assert len(count) == measurements
