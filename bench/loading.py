"""Loading a sharded pipeline of 4 GB: diffusers' from_pretrained beside tightfit.load, cold and warm, and peak memory.

The pipeline has the shape of Stable Diffusion 1.5 in float32, with random weights. Every contender loads it in a
process of its own, one after another, round after round. These processes are forked from one that has loaded a tiny
pipeline of the same classes in each way, so nothing is imported while the clock runs. Cold: the pages of the weight
files were dropped before (posix_fadvise, as root drop_caches where some stay); warm: they were read. "plain read" reads
the same files by read(2), 16 MiB at a time, and keeps nothing: cold, it is the disk's rate.

from_pretrained maps its files, and reads a weight when it is first used. So a byte of each 4 KiB of all weights is
read at the end, by every contender; "seconds" is the sum, "load_seconds" is without that. "disable_mmap" is diffusers'
own way to read files into memory at once. Memory is what the parent sees every 2 ms (RssAnon + RssShmem of
/proc/PID/status; pages of a mapped file do not count), "peak_above" the highest above what stays.

    python bench/loading.py --folder /tmp/loading              the whole comparison; 4.3 GB are written there once
    python bench/loading.py --folder /tmp/loading --rounds 1 --only level-0 --name ""     to try it out; writes nothing
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = 4096
BLOCK = 16 * 2**20  # bytes that a plain read asks for at once
ON_DISK = {"placement": "stream", "offload_to": "disk"}
ALL_ON_DISK = {"components": {"unet": ON_DISK, "text_encoder": ON_DISK, "vae": ON_DISK}}
LOADS: dict[str, dict[str, Any]] = {  # arguments of tightfit.load
    "level-0": {"level": 0, "device": "cpu"},
    "level-2": {"level": 2, "device": "loopback"},
    "level-3": {"level": 3, "device": "loopback"},
    "disk": {"plan": ALL_ON_DISK, "device": "cpu"},
}
PLAIN, THEIRS, NO_MMAP = "plain read", "from_pretrained", "from_pretrained disable_mmap"
FITTED = {f"from_pretrained + fit {name}": name for name in ("level-2", "level-3")}
CONTENDERS = (PLAIN, THEIRS, NO_MMAP, *LOADS, *FITTED)
Row = dict[str, Any]


def make_pipeline(scale: int) -> Any:
    """Stable Diffusion 1.5 in float32 with random weights; `scale` > 1: as deep, and so many times narrower."""
    import torch
    import transformers

    from measuring import fill_at_random
    from tightfit.catalog.known import known_model
    from tightfit.measure.build_models import build_known

    known = known_model("sd-1.5")
    if scale > 1:
        narrower(known.components["unet"].config, scale, "block_out_channels", "cross_attention_dim")
        narrower(known.components["vae"].config, scale, "block_out_channels")
        narrower(known.components["text_encoder"].config, scale, "hidden_size", "intermediate_size")
    pipe = build_known(known, torch.float32)
    for name in ("unet", "vae", "text_encoder"):
        fill_at_random(getattr(pipe, name))
    letters = {letter: place for place, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    ends = {f"{letter}</w>": place + 26 for letter, place in letters.items()}
    vocabulary = {**letters, **ends, "<|startoftext|>": 52, "<|endoftext|>": 53}
    pipe.register_modules(tokenizer=transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77))
    return pipe


def narrower(config: Row, scale: int, *names: str) -> None:
    for name in names:
        value = config[name]
        config[name] = (
            [max(each // scale // 32 * 32, 32) for each in value] if isinstance(value, list) else value // scale
        )


def make(folder: Path) -> None:
    """Writes both pipelines, each once: "full" in shards of at most 500 MB, "tiny" to import by."""
    for name, scale in (("full", 1), ("tiny", 4)):
        if not (folder / name / "model_index.json").exists():
            make_pipeline(scale).save_pretrained(folder / name, max_shard_size="500MB" if scale == 1 else "50MB")
            os.sync()


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def drop(files: list[Path]) -> None:
    """Drop the files' pages from the page cache; an error if some stay, as only root can drop some that were mapped."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if os.geteuid() == 0 and any(map(is_cached, files)):
        Path("/proc/sys/vm/drop_caches").write_text("1")
    cached = sum(is_cached(file) for file in files)
    assert not cached, f"pages of {cached} of {len(files)} files are still in the page cache"


def is_cached(file: Path) -> bool:
    """Whether any page of the file is in the page cache. To look changes nothing: a read would begin to read ahead."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype, library.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_long] * 4,
    )
    size = file.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // PAGE))()
    with file.open("rb") as stream:
        place = ctypes.c_void_p(library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, stream.fileno(), 0))
    try:
        assert library.mincore(place, ctypes.c_size_t(size), pages) == 0, os.strerror(ctypes.get_errno())
    finally:
        library.munmap(place, ctypes.c_size_t(size))
    return any(page & 1 for page in bytes(pages))


def plain_read(files: list[Path]) -> int:
    """Read all files one after another, as `cat` does; return the bytes."""
    buffer, count = bytearray(BLOCK), 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while size := stream.readinto(buffer):
                count += size
    return count


# the child


def weights_of(pipe: Any) -> list[Any]:
    """The pipeline's weights that have values, each once, with those that are offloaded in host memory."""
    import torch

    networks = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    found = {id(value): value for network in networks for value in (*network.parameters(), *network.buffers())}
    return [value.detach() for value in found.values() if type(value) in (torch.nn.Parameter, torch.Tensor)]


def touch(pipe: Any) -> int:
    """Read a byte of each page of all weights; return the bytes of the weights."""
    import torch

    total = 0
    for value in weights_of(pipe):
        if value.nbytes and not value.is_meta:
            flat = value.as_strided((value.numel(),), (1,), value.storage_offset()).view(torch.uint8)
            total += value.nbytes
            int(flat[::PAGE].sum()) + int(flat[-1])
    return total


def load(contender: str, folder: Path) -> Any:
    """The pipeline, loaded by `contender`; what has to be kept alive beside it comes with it."""
    import torch
    from diffusers import DiffusionPipeline

    import tightfit

    if contender in LOADS:
        return tightfit.load(folder, dtype="float32", **LOADS[contender])
    options = {"disable_mmap": True} if contender == NO_MMAP else {}
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32, safety_checker=None, **options)
    if contender in FITTED:
        return pipe, tightfit.fit(pipe, **LOADS[FITTED[contender]])
    return pipe, None


def run(contender: str, folder: Path) -> tuple[Row, Any]:
    """What it took to load the pipeline, and the pipeline."""
    begun = time.perf_counter()
    if contender == PLAIN:
        plain_read(weight_files(folder))
        seconds = time.perf_counter() - begun
        return {"load_seconds": seconds, "seconds": seconds}, None
    pipe, kept = load(contender, folder)
    loaded = time.perf_counter()
    touched = touch(pipe)
    return {
        "load_seconds": loaded - begun, "seconds": time.perf_counter() - begun, "touched_bytes": touched,
    }, (pipe, kept)  # fmt: skip


# the parent


@contextlib.contextmanager
def watching(pid: int) -> Iterator[list[int]]:
    """Fills a list with anonymous and shared bytes of the process, every 2 ms."""
    seen, over = [memory_of(pid)], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            seen.append(memory_of(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        seen.append(memory_of(pid))


def memory_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def measure(contender: str, folder: Path, cold: bool) -> Row:
    files = weight_files(folder)
    drop(files) if cold else plain_read(files)
    (go, ready), (told, tell) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        in_child(contender, folder, go, tell)
    os.close(tell)
    with os.fdopen(told) as stream, watching(pid) as seen:
        os.write(ready, b"g")
        row = json.loads(stream.readline())
    os.write(ready, b"e")
    os.waitpid(pid, 0)
    for handle in (go, ready):
        os.close(handle)
    row |= {"stays": seen[-1] - seen[0], "peak_above": max(seen) - seen[-1]}
    return {"contender": contender, "cold": cold, **row}


def in_child(contender: str, folder: Path, go: int, tell: int) -> None:
    """Begins when told to, and ends when told to: until then its memory is looked at."""
    status = 1
    try:
        os.read(go, 1)
        row, kept = run(contender, folder)
        os.write(tell, (json.dumps(row) + "\n").encode())
        os.read(go, 1)
        status = int(kept is None and contender != PLAIN)
    finally:
        os._exit(status)


def prepare(folder: Path) -> Row:
    """Imports all that loading needs, by loading a tiny pipeline in each way; returns the seconds."""
    started = time.perf_counter()
    import diffusers
    import transformers

    theirs = time.perf_counter()
    import tightfit

    assert tightfit.load
    ours = time.perf_counter()
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()
    for contender in CONTENDERS:
        run(contender, folder)
        gc.collect()
    gc.freeze()  # nothing that is there already is freed in a child, which would count
    return {"import_seconds": theirs - started, "import_tightfit_seconds": ours - theirs}


def summary(rows: list[Row], size: int) -> list[Row]:
    """Medians of each contender; by round, its rate against the plain read's and its time against from_pretrained's."""
    found = []
    for contender, cold in dict.fromkeys((row["contender"], row["cold"]) for row in rows):
        own = [row for row in rows if (row["contender"], row["cold"]) == (contender, cold)]
        line: Row = {"contender": contender, "cold": cold}
        for name in ("seconds", "load_seconds", "stays", "peak_above"):
            line[name] = round(statistics.median(row[name] for row in own), 3)
        line["rate"] = round(size / line["seconds"])
        for other, name in ((PLAIN, "of_disk_rate"), (THEIRS, "times_theirs"), (NO_MMAP, "times_no_mmap")):
            beside = {row["round"]: row["seconds"] for row in rows if (row["contender"], row["cold"]) == (other, cold)}
            ratios = [row["seconds"] / beside[row["round"]] for row in own if row["round"] in beside]
            if ratios:
                ratio = statistics.median(ratios)
                line[name] = round(1 / ratio if other == PLAIN else ratio, 3)
        found.append(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Loading a sharded pipeline of 4 GB.")
    parser.add_argument("--folder", type=Path, required=True, help="where the pipeline is made; not in the repository")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders, separated by commas")
    parser.add_argument("--states", default="cold,warm")
    parser.add_argument("--name", default="loading", help="of the file of results; empty: none")
    wishes = parser.parse_args()
    code = "import loading, pathlib, sys; loading.make(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(wishes.folder.resolve())], cwd=Path(__file__).parent, check=True)
    imports, folder = prepare(wishes.folder / "tiny"), wishes.folder / "full"
    size = sum(file.stat().st_size for file in weight_files(folder))
    rows: list[Row] = []
    for state in wishes.states.split(","):
        for number in range(wishes.rounds):
            for contender in wishes.only.split(","):
                rows.append({"round": number} | measure(contender, folder, state == "cold"))
                print(json.dumps(rows[-1]), flush=True)
    lines = summary(rows, size)
    facts = {"bytes": size, "files": len(weight_files(folder)), **imports, "summary": lines}
    for line in lines:
        print(json.dumps(line))
    if wishes.name:
        from measuring import write

        write(wishes.name, facts | {"rows": rows})


if __name__ == "__main__":
    main()
