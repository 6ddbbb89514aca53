"""Weights read from safetensors files: the same values, at addresses of which libraries think as of the file's."""

from __future__ import annotations

import contextlib
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tightfit.apply.weights.disk_store import DiskStore, SpillFile, read_stored
from tightfit.apply.weights.pinned_staging import Stager
from tightfit.apply.weights.weight_store import FileTensor
from tightfit.devices.copy_stream import HostCopyStream
from tightfit.devices.device import LoopbackDevice
from tightfit.devices.disk import DiskReader
from tightfit.devices.memory import OWN_MEMORY

SHAPES = {"a": (3, 64), "b": (5,), "c": (64, 7), "d": (16, 16), "e": (2, 3), "f": (1024, 600), "g": (0, 4)}


def stored_in(file: Path) -> dict[str, FileTensor]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    begin = {name: 8 + length + header[name]["data_offsets"][0] for name in SHAPES}
    read = load_file(file)
    return {name: FileTensor(file, begin[name], x.dtype, x.shape, x.stride()) for name, x in read.items()}


@pytest.mark.parametrize("more", [0, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_lie_as_in_a_mapped_file(more: int, dtype: torch.dtype, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    save_file(tensors, file, metadata={"filled": "x" * more})
    stored = stored_in(file)
    assert stored["f"].size >= OWN_MEMORY > stored["a"].size
    with DiskReader() as reader:
        one_by_one = {name: read_stored(each, reader) for name, each in stored.items()}
        together = dict(zip(stored, DiskStore(list(stored.values()), reader).values(), strict=True))
    with DiskReader() as reader, contextlib.closing(SpillFile()) as spill:
        aside = {name: spill.write(value) for name, value in together.items()}
        spill.finish()
        again = dict(zip(aside, DiskStore(list(aside.values()), reader).values(), strict=True))
    for found in (one_by_one, together, again):
        for name, value in found.items():
            assert torch.equal(value, tensors[name]), name
            assert not value.numel() or value.data_ptr() % 64 == stored[name].offset % 64, name


def test_a_file_for_weights_has_no_name_and_is_not_taken_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing is left of it however the process ends; the number of an open file is given to another one later."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with DiskReader() as reader:
        numbers, stored = [], []
        for value in (torch.ones(5), torch.zeros(5)):
            with contextlib.closing(SpillFile()) as spill:
                numbers.append(spill.path)
                stored.append(spill.write(value))
                assert not list(tmp_path.iterdir())
                assert torch.equal(read_stored(stored[-1], reader), value)
        assert numbers[0] == numbers[1]
        assert torch.equal(read_stored(stored[0], reader), torch.ones(5))  # the reader has it open still


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("more", [0, 8, 16])
@pytest.mark.parametrize("names", ["abcdefg", "f", "fb", "g", "dca"])
def test_on_a_card_each_weight_begins_where_any_other_tensor_would(
    names: str, more: int, staged: bool, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}
    save_file(tensors, file, metadata={"filled": "x" * more})
    stored = stored_in(file)
    with ExitStack() as end:
        reader = end.enter_context(DiskReader())
        stager = Stager(LoopbackDevice()) if staged else None
        if stager is not None:
            end.callback(stager.close)
        store = DiskStore([stored[name] for name in names], reader, stager, aligned=True)
        region = torch.full((store.size,), 255, dtype=torch.uint8)
        store.send(HostCopyStream(), region, None).wait_on_device()
        assert store.size <= sum(stored[name].size + 256 for name in names)
        again = store.values()
    for name, layout, value in zip(names, store.layouts, again, strict=True):
        assert layout.offset % 256 == 0 or not stored[name].size
        assert torch.equal(layout.view(region), tensors[name])
        assert torch.equal(value, tensors[name])
