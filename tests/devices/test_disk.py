"""The disk reader: every byte right, by whichever way it came, and no trouble that outlives its request."""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.apply.weights.disk_store import SpillFile, read_stored
from tightfit.devices import disk_file
from tightfit.devices.disk import SECTOR, DiskReader, Extent, Reading
from tightfit.devices.memory import arena
from tightfit.errors import InputError, ModelError, RunError

MIB = 2**20
LENGTH = 5 * SECTOR + 777  # of the small file
Read = Callable[[int, list[memoryview], int], int]  # os.preadv

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts handles in /proc and reads directly")


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(noise(LENGTH))
    return path


@pytest.fixture
def reader() -> Iterator[DiskReader]:
    with DiskReader() as one:
        yield one


def text_of(target: torch.Tensor) -> bytes:
    return target.numpy().tobytes()


def get(reader: DiskReader, path: Path, offset: int, size: int) -> bytes:
    """The extent, read into memory of exactly its size."""
    target = arena(size)
    reader.read([(Extent(path, offset, size), target)]).wait()
    return text_of(target)


def is_direct(handle: int) -> bool:
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)


@functools.cache
def reads_directly(folder: Path) -> bool:
    probe = folder / "probe"
    probe.write_bytes(bytes(SECTOR))
    try:
        handle = os.open(probe, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(handle, [arena(SECTOR).numpy().data], 0) == SECTOR
    except OSError:
        return False
    finally:
        os.close(handle)


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    if not reads_directly(tmp_path):
        pytest.skip(f"the file system of {tmp_path} refuses direct reads")
    return tmp_path


def replace_preadv(monkeypatch: pytest.MonkeyPatch, change: Callable[[Read, int, list[memoryview], int], int]) -> None:
    """From now on, reads are done by `change`, which is given the real function first."""
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, views, offset: change(real, handle, views, offset))


class Gate:
    """Reads wait in front of it until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.offsets: list[int] = []
        replace_preadv(monkeypatch, self._read)

    def _read(self, real: Read, handle: int, views: list[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        self.reached.set()
        assert self.opened.wait(20)
        return real(handle, views, offset)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    one = Gate(monkeypatch)
    yield one
    one.opened.set()


# what is read


def test_aligned_unaligned_and_the_tail(reader: DiskReader, file: Path) -> None:
    content = noise(LENGTH)
    cases = [(0, SECTOR), (SECTOR, 2 * SECTOR), (1, 1), (17, 5000), (LENGTH - 777, 777), (LENGTH - 1, 1), (0, LENGTH)]
    for offset, size in [*cases, (3, 0), (LENGTH, 0)]:
        assert get(reader, file, offset, size) == content[offset : offset + size], (offset, size)
    assert reader.bytes_read >= sum(size for _, size in cases)


def test_several_files_in_one_request(reader: DiskReader, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.bin" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(noise(3 * SECTOR, seed=number))
    target = arena(6 * SECTOR)
    order = [0, 1, 2, 1, 0, 2]
    pieces = [
        (Extent(paths[number], place % 3 * SECTOR, SECTOR), target[place * SECTOR : (place + 1) * SECTOR])
        for place, number in enumerate(order)
    ]
    reader.read(pieces).wait()
    expected = [noise(3 * SECTOR, seed=n)[place % 3 * SECTOR :][:SECTOR] for place, n in enumerate(order)]
    assert text_of(target) == b"".join(expected)


def test_long_reads_go_in_steps(reader: DiskReader, direct_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = direct_folder / "long.bin"
    size = 64 * MIB
    content = torch.arange(size // 8, dtype=torch.int64).view(torch.uint8)
    path.write_bytes(memoryview(content.numpy()))
    steps: list[int] = []

    def counting(real: Read, handle: int, views: list[memoryview], offset: int) -> int:
        steps.append(views[0].nbytes)
        return real(handle, views, offset)

    replace_preadv(monkeypatch, counting)
    target = arena(size)
    reader.read([(Extent(path, 0, size), target)]).wait()
    assert torch.equal(target, content)
    assert max(steps) == disk_file.STEP
    assert len(steps) == size // disk_file.STEP
    assert reader.bytes_read == reader.direct_bytes == size
    assert 0 < reader.seconds_busy < 60


PIECES = st.tuples(
    st.integers(0, LENGTH) | st.sampled_from(range(0, LENGTH, SECTOR)),  # from where in the file
    st.integers(0, LENGTH),  # how much, at most to its end
    st.sampled_from([0, 0, 1, 512, 4095]),  # how far behind a sector's beginning the target lies
    st.integers(0, SECTOR + 5),  # how much longer than needed it is
)


@settings(max_examples=200, deadline=None)
@given(cases=st.lists(PIECES, max_size=5))
def test_any_extents_are_read_exactly(cases: list[tuple[int, int, int, int]], shared: tuple[DiskReader, Path]) -> None:
    reader, path = shared
    content, room = noise(LENGTH), 8 * SECTOR
    before, came, memory = reader.direct_bytes, 0, arena(5 * room).fill_(0xA5)
    pieces, places = [], []
    for place, (offset, most, lead, more) in enumerate(cases):
        start, size = place * room + lead, min(most, LENGTH - offset)
        pieces.append((Extent(path, offset, size), memory[start : start + size + more]))
        sectors = -(-size // SECTOR) * SECTOR
        direct = offset % SECTOR == 0 and lead == 0 and size + more >= sectors and reads_directly(path.parent)
        came += min(sectors, LENGTH - offset) if direct else 0
        places.append((start, offset, size, sectors if direct else size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_file, "STEP", 2 * SECTOR)
        reader.read(pieces).wait()
    assert reader.direct_bytes - before == came
    for start, offset, size, written in places:
        assert text_of(memory[start : start + size]) == content[offset : offset + size]
        memory[start : start + written] = 0xA5
    assert memory.eq(0xA5).all(), "something was written beyond the extents' last sectors"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DiskReader, Path]]:
    path = tmp_path_factory.mktemp("shared") / "weights.bin"
    path.write_bytes(noise(LENGTH))
    with DiskReader() as reader:
        yield reader, path


@pytest.mark.parametrize(
    ("extent", "target"),
    [
        ((0, 9), torch.empty(8, dtype=torch.uint8)),
        ((-1, 8), torch.empty(8, dtype=torch.uint8)),
        ((0, -8), torch.empty(8, dtype=torch.uint8)),
        ((0, 8), torch.empty(8, dtype=torch.int8)),
        ((0, 8), torch.empty(16, dtype=torch.uint8)[::2]),
        ((0, 8), torch.empty(8, dtype=torch.uint8, device="meta")),
    ],
)
def test_targets_that_will_not_do(
    reader: DiskReader, file: Path, extent: tuple[int, int], target: torch.Tensor
) -> None:
    with pytest.raises(InputError, match=f"{extent[1]} bytes from {extent[0]} on, of {file}, need"):
        reader.read([(Extent(file, *extent), target)])
    assert get(reader, file, 0, 10) == noise(LENGTH)[:10]


# which way it comes


def test_the_page_cache_is_passed_by_where_all_is_aligned(direct_folder: Path) -> None:
    path = direct_folder / "weights.bin"
    path.write_bytes(noise(LENGTH))
    with DiskReader() as reader:
        get(reader, path, SECTOR, 2 * SECTOR)
        assert reader.direct_bytes == reader.bytes_read == 2 * SECTOR
        target = arena(SECTOR)
        reader.read([(Extent(path, 5 * SECTOR, 700), target)]).wait()  # room for the whole sector: the file ends in it
        assert reader.direct_bytes == reader.bytes_read == 2 * SECTOR + 777
        get(reader, path, SECTOR, 700)  # no room for the whole sector
        get(reader, path, SECTOR + 512, SECTOR)
        assert reader.direct_bytes == 2 * SECTOR + 777
        assert reader.bytes_read == reader.direct_bytes + 700 + SECTOR
        assert reader.notes == []


def test_what_came_through_the_page_cache_leaves_it(
    reader: DiskReader, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda handle, *given: advice.append(given))
    get(reader, file, 100, 5000)
    assert advice == [(100, 5000, os.POSIX_FADV_DONTNEED)]
    advice.clear()
    if reads_directly(file.parent):
        get(reader, file, 0, SECTOR)
        assert advice == []


def test_file_systems_that_do_not_open_directly(
    reader: DiskReader, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str | Path, how: int) -> int:
        if how & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, how)

    monkeypatch.setattr(os, "open", refusing)
    for _ in range(2):
        assert get(reader, file, SECTOR, 2 * SECTOR) == noise(LENGTH)[SECTOR : 3 * SECTOR]
    assert (reader.direct_bytes, reader.bytes_read) == (0, 4 * SECTOR)
    assert reader.notes == [
        f"{file} is read through the page cache: direct reads are refused ({os.strerror(errno.EINVAL)})."
    ]


def test_what_is_in_the_page_cache_is_copied_from_there_where_that_is_wanted(direct_folder: Path) -> None:
    """To look whether a page is there may bring a few in, which are not read again."""
    size, path = 64 * SECTOR, direct_folder / "file"
    content = arena(size)
    content.copy_(torch.frombuffer(bytearray(noise(size)), dtype=torch.uint8))
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    assert os.pwritev(handle, [content.numpy().data], 0) == size  # leaves nothing in the page cache
    os.close(handle)

    def direct_bytes(*, cached: bool) -> int:
        target, done, direct = arena(size), 0, 0
        with closing(disk_file.DiskFile(path, cached=cached)) as file:
            while done < size:
                counts = file.read(disk_file.ReadTarget.of(Extent(path, 0, size), target), done)
                done, direct = done + counts[0], direct + counts[1]
        assert torch.equal(target, content)
        return direct

    assert direct_bytes(cached=True) >= size - 8 * SECTOR
    path.read_bytes()
    assert direct_bytes(cached=True) == 0
    assert direct_bytes(cached=False) == size


def test_no_more_absent_pages_are_asked_for_than_were_in_the_page_cache(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would begin to read those that are asked for, and on a fast disk the next look would find them."""
    held, asked, path = 5 * SECTOR, list[int](), direct_folder / "file"
    path.write_bytes(noise(64 * SECTOR))

    def from_cache(handle: int, views: list[memoryview], offset: int, flags: int) -> int:
        asked.append(len(views[0]))
        if offset >= held:
            raise BlockingIOError
        return min(len(views[0]), held - offset)

    target = arena(64 * SECTOR)
    with closing(disk_file.DiskFile(path, cached=True)) as file:
        monkeypatch.setattr(os, "preadv", from_cache)
        assert file.read(disk_file.ReadTarget.of(Extent(path, 0, 64 * SECTOR), target), 0) == (held, 0)
    assert asked == [SECTOR, 2 * SECTOR, 4 * SECTOR]


@pytest.mark.parametrize("good_steps", [0, 1])
def test_file_systems_that_open_but_do_not_read_directly(
    reader: DiskReader, direct_folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch, good_steps: int
) -> None:
    tried: list[int] = []

    def refusing(real: Read, handle: int, views: list[memoryview], offset: int) -> int:
        if is_direct(handle):
            tried.append(offset)
            if len(tried) > good_steps:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(handle, views, offset)

    replace_preadv(monkeypatch, refusing)
    monkeypatch.setattr(disk_file, "STEP", SECTOR)
    handles = left_behind()[1]
    for _ in range(2):
        assert get(reader, file, 0, 3 * SECTOR) == noise(LENGTH)[: 3 * SECTOR]
    assert len(tried) == good_steps + 1, "it was tried again"
    assert left_behind()[1] == handles + 1
    assert (reader.direct_bytes, reader.bytes_read) == (good_steps * SECTOR, 6 * SECTOR)
    assert [str(file) in note for note in reader.notes] == [True]


def test_reads_may_bring_less_than_asked(reader: DiskReader, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def little(real: Read, handle: int, views: list[memoryview], offset: int) -> int:
        return min(1000, real(handle, [views[0][:SECTOR]], offset))

    replace_preadv(monkeypatch, little)
    assert get(reader, file, 0, 3 * SECTOR) == noise(LENGTH)[: 3 * SECTOR]
    assert get(reader, file, 5, LENGTH - 5) == noise(LENGTH)[5:]
    assert reader.notes == []


# what goes wrong


def fails(reading: Reading, pattern: str) -> ModelError:
    with pytest.raises(ModelError, match=pattern) as caught:
        reading.wait()
    with pytest.raises(ModelError, match=pattern):
        reading.wait()
    assert reading.done
    return caught.value


@pytest.mark.parametrize(("offset", "size"), [(0, LENGTH + 1), (SECTOR, 6 * SECTOR), (LENGTH, 1), (9 * SECTOR, SECTOR)])
def test_a_file_that_is_too_short(reader: DiskReader, file: Path, offset: int, size: int) -> None:
    reading = reader.read([(Extent(file, offset, size), arena(size))])
    error = fails(reading, f"{file} ends after {LENGTH} bytes: of {size} from {offset} on, only ")
    assert error.facts == {"path": str(file), "offset": offset, "size": size, "came": max(0, LENGTH - offset)}


def test_a_file_that_is_cut_while_it_is_in_use(reader: DiskReader, file: Path) -> None:
    get(reader, file, 0, LENGTH)
    status = file.stat()
    os.truncate(file, SECTOR)
    pattern = rf"{file} was changed while it was in use: it had {LENGTH} bytes, .* now it has {SECTOR}"
    fails(reader.read([(Extent(file, 0, LENGTH), arena(LENGTH))]), pattern)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    fails(reader.read([(Extent(file, 0, 10), arena(10))]), pattern)


def test_a_file_that_is_changed_while_it_is_in_use(reader: DiskReader, file: Path) -> None:
    get(reader, file, 0, 10)
    status = file.stat()
    file.write_bytes(noise(LENGTH, seed=1))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    fails(reader.read([(Extent(file, 0, 10), arena(10))]), "was changed while it was in use")


def test_a_file_that_is_changed_in_the_middle_of_a_request(reader: DiskReader, file: Path, gate: Gate) -> None:
    reading = reader.read([(Extent(file, 1, 10), arena(10))])
    assert gate.reached.wait(20)
    os.utime(file, ns=(0, 0))
    gate.opened.set()
    fails(reading, "was changed while it was in use")


def test_a_file_that_is_replaced_is_read_on(reader: DiskReader, file: Path) -> None:
    get(reader, file, 0, 10)
    replace(file)
    assert get(reader, file, 0, LENGTH) == noise(LENGTH)


def replace(file: Path) -> None:
    """Another file takes its name, of as many zeros."""
    other = file.with_name("other")
    other.write_bytes(bytes(LENGTH))
    other.replace(file)


def test_a_file_that_is_replaced_while_it_is_opened(
    reader: DiskReader, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def replacing(path: str | Path, how: int) -> int:
        handle = real(path, how)
        if path == file:
            replace(file)
        return handle

    monkeypatch.setattr(os, "open", replacing)
    assert get(reader, file, 0, SECTOR) + get(reader, file, SECTOR, LENGTH - SECTOR) == noise(LENGTH)


def test_files_that_cannot_be_read_and_the_next_request(
    reader: DiskReader, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = file.with_name("missing.bin")
    for path, why in [(missing, errno.ENOENT), (file.parent, errno.EISDIR)]:
        pieces = [(Extent(file, 0, 10), arena(10)), (Extent(path, 1, 10), arena(10))]
        fails(reader.read(pieces), f"{path} cannot be read: {os.strerror(why)}")
        assert get(reader, file, 7, 10) == noise(LENGTH)[7:17]
    missing.write_bytes(b"now it is there")
    assert get(reader, missing, 0, 3) == b"now"


@pytest.mark.parametrize(
    ("trouble", "kind", "pattern"),
    [
        (OSError(errno.EIO, "Input/output error"), ModelError, "weights.bin cannot be read: Input/output error"),
        (MemoryError("none left"), RunError, r"1 pieces \(4 KiB\) were not read: MemoryError\('none left'\)"),
    ],
)
def test_troubles_of_one_request_are_not_those_of_the_next(
    reader: DiskReader, file: Path, trouble: Exception, kind: type[Exception], pattern: str
) -> None:
    def failing(real: Read, handle: int, views: list[memoryview], offset: int) -> int:
        raise trouble

    with pytest.MonkeyPatch.context() as patch:
        replace_preadv(patch, failing)
        reading = reader.read([(Extent(file, 0, SECTOR), arena(SECTOR))])
        for _ in range(2):
            with pytest.raises(kind, match=pattern):
                reading.wait()
    assert get(reader, file, 0, SECTOR) == noise(LENGTH)[:SECTOR]
    assert reader.notes == []


@pytest.mark.parametrize("size", [10, LENGTH + 1])
def test_a_reading_that_is_over_keeps_no_memory(reader: DiskReader, file: Path, size: int) -> None:
    gc.disable()
    try:
        target = arena(4 * MIB)
        address = target.data_ptr()
        reading = reader.read([(Extent(file, 0, size), target)])
        while not reading.done:
            time.sleep(0.001)
        del target
        get(reader, file, 0, 1)  # by now the thread is at something else
        taken = [line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines()]
        assert not any(int(start, 16) <= address < int(start, 16) + MIB for start in taken)
    finally:
        gc.enable()
    assert reading.done


# who waits for whom


def test_reading_goes_on_in_the_background_and_in_order(reader: DiskReader, file: Path, gate: Gate) -> None:
    targets = [arena(10) for _ in range(4)]
    readings = [reader.read([(Extent(file, 1 + place, 10), target)]) for place, target in enumerate(targets)]
    assert gate.reached.wait(20)
    assert not any(reading.done for reading in readings)
    threading.Timer(0.2, gate.opened.set).start()
    assert 0.1 < readings[3].wait() < 20
    assert all(reading.done for reading in readings)
    assert readings[0].wait() < 0.1
    assert gate.offsets == [1, 2, 3, 4]
    assert [text_of(target) for target in targets] == [noise(LENGTH)[1 + place :][:10] for place in range(4)]
    assert 0.1 < reader.seconds_busy < 20


class Interrupted(Exception):
    pass


def test_who_waits_can_be_interrupted(reader: DiskReader, file: Path, gate: Gate) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        target = arena(10)
        reading = reader.read([(Extent(file, 1, 10), target)])
        main = threading.get_ident()
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(Interrupted):
            reading.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not reading.done
    gate.opened.set()
    reading.wait()
    assert text_of(target) == noise(LENGTH)[1:11]


def test_what_is_cancelled_before_it_begins_is_not_read(reader: DiskReader, file: Path, gate: Gate) -> None:
    first = reader.read([(Extent(file, 1, 10), arena(10))])
    second = reader.read([(Extent(file, 2, 10), arena(10)), (Extent(file, 3, 10), arena(10))])
    third = reader.read([(Extent(file, 4, 10), arena(10))])
    assert gate.reached.wait(20)
    second.cancel()
    second.cancel()
    assert second.done
    assert not first.done
    for _ in range(2):
        with pytest.raises(RunError, match=r"the reading of 2 pieces \(20 B\) was cancelled"):
            second.wait()
    gate.opened.set()
    first.wait()
    third.wait()
    assert gate.offsets == [1, 4]
    third.cancel()
    third.wait()


def test_what_is_cancelled_in_the_middle_ends_with_its_step(
    reader: DiskReader, file: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_file, "STEP", SECTOR)
    target = arena(LENGTH)
    reading = reader.read([(Extent(file, 0, LENGTH), target)])
    assert gate.reached.wait(20)
    threading.Timer(0.2, gate.opened.set).start()
    start = time.perf_counter()
    reading.cancel()
    assert time.perf_counter() - start > 0.1, "the reader may still write there"
    assert reading.done
    assert gate.offsets == [0]
    assert not target[SECTOR:].any()
    with pytest.raises(RunError, match="was cancelled"):
        reading.wait()
    assert get(reader, file, 1, 10) == noise(LENGTH)[1:11]


# what is left behind


def left_behind() -> tuple[list[str], int]:
    """Reading threads and open handles."""
    names = [thread.name for thread in threading.enumerate() if "disk" in thread.name]
    return names, len(os.listdir("/proc/self/fd"))


def test_nothing_is_there_before_the_first_request(file: Path) -> None:
    before = left_behind()
    with DiskReader() as reader:
        assert left_behind() == before
        get(reader, file, 0, 10)
        get(reader, file, 10, 10)
        threads, handles = left_behind()
        assert len(threads) == len(before[0]) + 1
        assert handles == before[1] + (2 if reads_directly(file.parent) else 1)
    assert left_behind() == before


def test_close_cancels_what_is_pending(file: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "STEP", SECTOR)
    before = left_behind()
    reader = DiskReader()
    readings = [reader.read([(Extent(file, 0, LENGTH), arena(LENGTH))]) for _ in range(3)]
    assert gate.reached.wait(20)
    threading.Timer(0.2, gate.opened.set).start()
    reader.close()
    reader.close()
    assert left_behind() == before
    assert gate.offsets == [0]
    for reading in readings:
        assert reading.done
        with pytest.raises(RunError, match="was cancelled"):
            reading.wait()
    with pytest.raises(RunError, match=r"this disk reader was closed, after 4 KiB"):
        reader.read([])


def test_a_reader_that_nobody_has_any_more_is_closed(file: Path) -> None:
    before = left_behind()
    reader = DiskReader()
    reading = reader.read([(Extent(file, 0, 10), arena(10))])
    reading.wait()
    assert left_behind() != before
    del reader
    assert left_behind() == before
    assert reading.wait() < 1


def test_the_garbage_collector_may_close_it_in_its_own_thread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    ready = threading.Event()

    def collecting(real: Read, handle: int, views: list[memoryview], offset: int) -> int:
        assert ready.wait(20)
        collected.append(gc.collect())
        return real(handle, views, offset)

    replace_preadv(monkeypatch, collecting)
    gc.collect()  # of earlier tests
    before = left_behind()
    gc.disable()
    try:
        reader = DiskReader()
        reader.itself = reader  # type: ignore[attr-defined]
        readings = [reader.read([(Extent(file, 1, 10), arena(10))]) for _ in range(2)]
        own = threading.enumerate()[-1]  # the newest
        del reader
        ready.set()
        for reading in readings:
            with pytest.raises(RunError, match="was cancelled"):
                reading.wait()
    finally:
        gc.enable()
    own.join(20)
    assert len(collected) == 1
    assert left_behind() == before


def test_systems_without_reads_at_a_place(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwrite", "O_DIRECT"):  # Windows has none of them
        monkeypatch.delattr(os, name)
    with DiskReader() as reader:
        assert get(reader, file, 5, LENGTH - 9) == noise(LENGTH)[5:-4]
        assert reader.direct_bytes == 0
        value = torch.arange(10_000)
        spill = SpillFile()
        spill.write(torch.ones(3))
        assert torch.equal(read_stored(spill.write(value), reader), value)
