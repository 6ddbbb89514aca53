"""Reading a model's tensors: each once, several files at a time, exactly, in little memory, or one clear error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from a_few import a_few
from tightfit import ModelError
from tightfit.checkpoint import tensor_reads
from tightfit.checkpoint.tensor_reads import PendingTensor, TensorReads
from tightfit.checkpoint.tensors import TensorLocation, read_locations
from tightfit.devices import disk_file
from tightfit.devices.disk_file import SECTOR

MIB = 2**20
SIZES = (3 * MIB + 4, 8, 400, 2 * MIB, 40, 12, 17 * MIB, 100_000, 1_000_000)  # bytes of float32
Read = Callable[..., int]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads directly, and looks into /proc")


def write(file: Path, seed: int, sizes: Sequence[int] = SIZES) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    tensors = {f"{file.stem}.{place}": torch.randn(size // 4, generator=drawn) for place, size in enumerate(sizes)}
    tensors[f"{file.stem}.square"] = torch.randn(3, 5, 7, generator=drawn)
    tensors[f"{file.stem}.scalar"] = torch.tensor(float(seed))
    tensors[f"{file.stem}.empty"] = torch.empty(0, 4)
    save_file(tensors, file)
    return tensors


@pytest.fixture
def written(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The tensors of three files in `tmp_path`."""
    return {name: value for n in range(3) for name, value in write(tmp_path / f"{n}.safetensors", n).items()}


def pending(folder: Path, dtype: torch.dtype | None = None) -> dict[str, PendingTensor]:
    places = read_locations(sorted(folder.glob("*.safetensors")))
    order = sorted(places.items(), key=lambda item: (str(item[1].path), item[1].offset))
    return {name: PendingTensor(place, dtype or place.dtype) for name, place in order}


def read(tensors: dict[str, PendingTensor]) -> None:
    with TensorReads() as reads:
        reads.start(tensors.values())
        reads.wait()


def watch_reads(monkeypatch: pytest.MonkeyPatch, change: Callable[[Read, Any, Any, int], int] | None = None) -> None:
    real = os.preadv

    def preadv(handle: int, views: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError  # nothing is in the page cache
        return change(real, handle, views, offset) if change else real(handle, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
def test_every_tensor_is_as_it_was_saved(
    written: dict[str, torch.Tensor], tmp_path: Path, dtype: torch.dtype | None, cached: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not cached:
        watch_reads(monkeypatch)
    tensors = pending(tmp_path, dtype)
    read(tensors)
    assert tensors.keys() == written.keys()
    for name, tensor in tensors.items():
        wanted = written[name] if dtype is None else written[name].to(dtype)
        assert tensor.value is not None
        assert (tensor.value.dtype, tensor.value.stride()) == (wanted.dtype, wanted.stride())
        assert torch.equal(tensor.value, wanted), name
        if dtype is None:  # matrix libraries choose kernels by it
            assert not tensor.value.numel() or tensor.value.data_ptr() % 64 == tensor.place.offset % 64


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tensors_at_odd_offsets(tmp_path: Path, shift: int, dtype: torch.dtype) -> None:
    """Other writers than safetensors' own do not align what they write."""
    value = torch.randn(9 * MIB // 4)
    file = tmp_path / "odd.bin"
    places = []
    data = b"\0" * shift
    for count in (9 * MIB // 4, 7, 300_000):
        places.append((len(data), count))
        data += value[:count].numpy().tobytes() + b"\1" * 4
    file.write_bytes(data)
    state = disk_file.FileState.of(file.stat())
    tensors = {
        str(offset): PendingTensor(TensorLocation(file, offset, 4 * count, torch.float32, (count,), state), dtype)
        for offset, count in places
    }
    read(tensors)
    for (_, count), tensor in zip(places, tensors.values(), strict=True):
        assert tensor.value is not None
        assert torch.equal(tensor.value, value[:count].to(dtype))


def test_no_byte_is_read_twice(
    written: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the sectors that two tensors share, of which each needs a part."""
    lock, spans = threading.Lock(), []

    def record(real: Read, handle: int, views: Any, offset: int) -> int:
        count = real(handle, views, offset)
        with lock:
            spans.append((os.fstat(handle).st_ino, offset, offset + count))
        return count

    watch_reads(monkeypatch, record)
    tensors = pending(tmp_path)
    read(tensors)
    shared = 0
    for (file, _, end), (next_file, begin, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
        assert file != next_file or end - begin <= SECTOR
        shared += max(end - begin, 0) if file == next_file else 0
    straight = sum(tensor.straight for tensor in tensors.values())
    assert straight == 9
    assert shared <= 2 * SECTOR * straight
    total = sum(end - begin for _, begin, end in spans)
    assert sum(value.nbytes for value in written.values()) <= total
    assert total <= sum(file.stat().st_size for file in tmp_path.iterdir()) + shared
    assert len(spans) <= 2 * straight + 20  # small ones together


def test_several_files_are_read_at_a_time(
    written: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of each file waits until all three are being read: one after another would never end."""
    files, together = set(), threading.Barrier(3)
    lock = threading.Lock()

    def meet(real: Read, handle: int, views: Any, offset: int) -> int:
        with lock:
            first = (inode := os.fstat(handle).st_ino) not in files
            files.add(inode)
        if first:
            together.wait(20)
        return real(handle, views, offset)

    watch_reads(monkeypatch, meet)
    read(pending(tmp_path))
    assert len(files) == 3


def test_one_large_file_is_shared_by_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one.safetensors", 0)
    monkeypatch.setattr(tensor_reads, "SHARE", 4 * MIB)
    threads, together = set(), threading.Barrier(3)
    lock = threading.Lock()

    def meet(real: Read, handle: int, views: Any, offset: int) -> int:
        with lock:
            first = threading.get_ident() not in threads and len(threads) < 3
            threads.add(threading.get_ident())
        if first:
            together.wait(20)
        return real(handle, views, offset)

    watch_reads(monkeypatch, meet)
    read(pending(tmp_path))


def test_a_file_that_ends_while_it_is_read(
    written: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, file = pending(tmp_path), tmp_path / "1.safetensors"

    def cut(real: Read, handle: int, views: Any, offset: int) -> int:
        if os.fstat(handle).st_ino == file.stat().st_ino and file.stat().st_size > 5 * MIB:
            os.truncate(file, 5 * MIB)
        return real(handle, views, offset)

    watch_reads(monkeypatch, cut)
    with pytest.raises(ModelError, match=r"1\.safetensors was changed while it was in use"):
        read(tensors)


def test_reads_that_end_too_soon(
    written: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some bytes at a time are read on; none at all is an error that names the file."""
    watch_reads(monkeypatch, lambda real, handle, views, offset: real(handle, [views[0][: 64 * SECTOR]], offset))
    tensors = pending(tmp_path)
    read(tensors)
    assert all(torch.equal(tensors[name].value, value) for name, value in written.items())  # type: ignore[arg-type]
    monkeypatch.undo()
    watch_reads(monkeypatch, lambda real, handle, views, offset: 0)
    with pytest.raises(ModelError, match=r"\.safetensors ends after \d+ bytes"):
        read(pending(tmp_path))


@pytest.mark.parametrize("change", ["overwrite", "replace", "remove"])
def test_a_file_that_changed_since_its_header_was_read(
    written: dict[str, torch.Tensor], tmp_path: Path, change: str
) -> None:
    tensors, file = pending(tmp_path), tmp_path / "2.safetensors"
    data = file.read_bytes()
    time.sleep(0.02)  # file systems date in ticks
    if change != "overwrite":
        file.unlink()
    if change != "remove":
        file.write_bytes(data)
    with pytest.raises(ModelError, match=r"2\.safetensors (was changed while it was in use|cannot be read: No such)"):
        read(tensors)


def test_an_error_stops_all_threads(
    written: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(real: Read, handle: int, views: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    before = threading.active_count()
    watch_reads(monkeypatch, fail)
    with pytest.raises(ModelError, match="cannot be read: Input/output error"):
        read(pending(tmp_path))
    assert threading.active_count() == before


PEAK = """
import sys
from pathlib import Path
import torch
from anonymous_memory import anonymous_bytes, highest_anonymous
import tightfit, os
folder, tiny = Path(sys.argv[1]), Path(sys.argv[2])
kept = [tightfit.load(tiny, level=0, device="cpu", dtype=sys.argv[3])]  # all is imported
with highest_anonymous() as seen:
    pipe = tightfit.load(folder, level=0, device="cpu", dtype=sys.argv[3]).pipe
    stays = anonymous_bytes(os.getpid())
print(seen.most - stays, stays, sum(value.nbytes for value in pipe.parameters()))
"""


@pytest.mark.parametrize("dtype", a_few(["float32", "float16"], "float16"))
def test_peak_memory_is_what_stays(tmp_path: Path, dtype: str) -> None:
    """At most one tensor and 64 MiB more than the 300 MB that stay, also where every tensor is converted."""
    from diffusers import FluxTransformer2DModel

    for name, heads in (("full", 8), ("tiny", 1)):
        model = FluxTransformer2DModel(
            num_layers=1, num_single_layers=3, attention_head_dim=64, num_attention_heads=heads * 2,
            joint_attention_dim=1024, pooled_projection_dim=768, axes_dims_rope=(8, 28, 28),
        )  # fmt: skip
        model.save_pretrained(tmp_path / name, max_shard_size="100MB")
        largest, total = max(value.nbytes for value in model.parameters()), sum(v.nbytes for v in model.parameters())
        if name == "full":
            assert total > 300e6
            assert len(list((tmp_path / name).glob("*.safetensors"))) > 2
            most = largest + 64 * MIB
        del model
    command = [sys.executable, "-c", PEAK, str(tmp_path / "full"), str(tmp_path / "tiny"), dtype]
    tests = Path(__file__).parents[1]  # where `anonymous_memory` is
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tests)
    assert run.returncode == 0, run.stderr[-2000:]
    above, stays, weights = map(int, run.stdout.split()[-3:])
    assert stays > weights
    assert above <= most, f"{above / MIB:.0f} MiB above the {stays / MIB:.0f} that stay"
