"""Exported autoencoders in files: the same numbers in another process without an export; what differs is made anew."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderTiny
from torch import nn

from apply.test_strips import program_of
from tightfit import fit
from tightfit.apply.activations.exporting import NotExported, without_weights
from tightfit.apply.activations.strips import called_program
from tightfit.apply.activations.strips import graph_cache as archive
from tightfit.apply.activations.strips.export_graph import UnsupportedGraph
from tightfit.apply.activations.strips.graph_cache import (
    kept_program,
    mark_of_call,
    program_from_json,
    program_to_json,
    strip_plan_from_json,
    strip_plan_to_json,
)
from tightfit.apply.activations.strips.program import Node, Program, Ref
from tightfit.apply.activations.strips.strip_plan import StripPlan, find_strip_plan
from tightfit.schema.footprint import FeatureMaps

X = torch.randn(1, 4, 6, 5, generator=torch.Generator().manual_seed(1))


def make(**changes: Any) -> AutoencoderTiny:
    torch.manual_seed(0)
    blocks: dict[str, Any] = {f"num_{part}_blocks": (1, 1) for part in ("encoder", "decoder")}
    widths: dict[str, Any] = {f"{part}_block_out_channels": (8, 8) for part in ("encoder", "decoder")}
    return AutoencoderTiny(**blocks | widths | changes).eval()


def decode(
    module: Any, x: torch.Tensor = X, changes: Any = None, device: str = "cpu", strips: int = 10_000, **settings: Any
) -> Any:
    """What `module` gives in strips, and what was noted."""
    plan = {"components": {"model": changes or {}}, "vae": {"strips": strips}}
    fitted = fit(module, plan=plan, device=device, count_activations=False)
    try:
        with torch.no_grad():
            result = module.decode(x, **settings)
        return result, [note for note in fitted.report().trace.notes if "counted" not in note]
    finally:
        fitted.undo()


class Anew(BaseException):
    """A program is about to be exported."""


def refuse(*_: object) -> Program:
    raise Anew


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Program, torch.Tensor]:
    """A folder in which the program of `make()` is kept, the program, and what it decodes."""
    folder, made = tmp_path_factory.mktemp("archived"), []
    capture = called_program.capture

    def told(*args: Any) -> Program:
        made.append(capture(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(called_program, "capture", told)
        result, notes = decode(make())
    assert notes == []
    return folder, made[0], result.sample


@pytest.fixture
def programs(archived: tuple[Path, Program, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of programs, as it was; exporting raises Anew."""
    shutil.copytree(archived[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(called_program, "capture", refuse)
    return tmp_path / "tightfit" / "programs"


ELSEWHERE = """
import sys, torch
torch.export.export = None  # nothing is exported
from test_stored_programs import decode, make
result, notes = decode(make())
assert notes == [], notes
sys.stdout.buffer.write(result.sample.numpy().tobytes())
"""


def test_another_process_decodes_without_an_export(archived: tuple[Path, Program, torch.Tensor]) -> None:
    folder, _, wanted = archived
    places = os.pathsep.join(sys.path)
    surroundings = os.environ | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": places}
    found = subprocess.run([sys.executable, "-c", ELSEWHERE], check=False, capture_output=True, env=surroundings)
    assert found.returncode == 0, found.stderr.decode()
    assert found.stdout == wanted.numpy().tobytes()


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({}, "cpu"),
        ({"placement": "stream"}, "loopback"),
        ({"placement": "offload"}, "loopback"),
        ({"channels_last": True}, "cpu"),
        ({"storage": "float8_e4m3fn"}, "cpu"),
    ],
)
def test_one_program_serves_wherever_weights_are(
    programs: Path, archived: tuple[Path, Program, torch.Tensor], changes: dict[str, Any], device: str
) -> None:
    result, notes = decode(make(), changes=changes, device=device)
    assert notes == []
    assert type(result).__name__ == "DecoderOutput"
    if not {"storage", "channels_last"} & set(changes):
        assert torch.equal(result.sample, archived[2])


def test_hooks_of_whoever_waits_for_a_layer_leave_no_mark(programs: Path) -> None:
    module = make()
    for part in module.modules():
        part.register_forward_hook(lambda *_: None, always_call=True, with_kwargs=True).remove()
    fit(module, plan={"components": {"model": {"placement": "stream"}}}, device="loopback").undo()
    assert decode(module)[1] == []


class Own(AutoencoderTiny):
    pass


def _with(name: str, value: Any) -> Callable[[], nn.Module]:
    def change() -> nn.Module:
        module = make()
        setattr(module, name, value)
        return module

    return change


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (make, {"x": X[:, :, :4]}),
        (make, {"x": X[:, :, :, :4]}),
        (make, {"x": torch.cat([X, X]), "generator": None}),
        (lambda: make().double(), {"x": X.double()}),
        (make, {"return_dict": False}),
        (lambda: make(act_fn="silu"), {}),
        (lambda: make(decoder_block_out_channels=(16, 8)), {}),
        (_with("table", torch.ones(1)), {}),
        (_with("config_of_ours", 3), {}),
    ],
)
def test_what_differs_is_made_anew(programs: Path, module: Callable[[], nn.Module], call: dict[str, Any]) -> None:
    with pytest.raises(Anew):
        decode(module(), **call)


def test_other_code_makes_it_anew(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "mark_of_makers", lambda: "another")
    with pytest.raises(Anew):
        decode(make())


def mark(module: nn.Module, *arguments: Any) -> str:
    return mark_of_call(without_weights(module), "decode", "form", (X, *arguments))


def test_marks() -> None:
    usual = mark(make())
    assert len(usual) == 64
    assert usual == mark(make())
    tables = [mark(_with("table", torch.full((3,), value))()) for value in (1.0, 1.0, 2.0)]
    assert tables[0] == tables[1]
    assert len({usual, *tables, mark(make(), 1), mark(make(), True), mark(make(), None), mark(make(), "x")}) == 7
    assert mark(Own().eval()) == ""  # whose code may change unseen
    assert mark(_with("act", lambda x: x)()) == ""
    assert mark(make(), object()) == ""
    assert mark(make(), torch.Generator()) == mark(make(), torch.Generator().manual_seed(1)) != mark(make(), None)


def test_what_draws_from_a_generator_is_not_kept(programs: Path) -> None:
    before = set(programs.iterdir())
    drawn = Node("aten.randn.generator", ([1, 2],), {"generator": torch.Generator()}, (1, 2), torch.float32)
    program = Program((drawn,), (), (0,), {})
    assert kept_program("0" * 64, nn.Module(), [], lambda: program) is program
    assert set(programs.iterdir()) == before


# what cannot be used


def _json(change: Callable[[dict[str, Any]], object], part: str = "program.json") -> Callable[[Path], None]:
    """A file that is whole and says something else in one part."""

    def spoil(file: Path) -> None:
        with zipfile.ZipFile(file) as bundle:
            parts = {name: bundle.read(name) for name in bundle.namelist()}
        said = json.loads(parts[part])
        change(said)
        with zipfile.ZipFile(file, "w") as bundle:
            for name, content in (parts | {part: json.dumps(said).encode()}).items():
                bundle.writestr(name, content)

    return spoil


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)


def _replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _replace_by_pipe(file: Path) -> None:
    """Whoever opens it waits for a writer."""
    file.unlink()
    os.mkfifo(file)


SPOILT: dict[str, Callable[[Path], object]] = {
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-200]),
    "empty": lambda file: file.write_bytes(b""),
    "something else": lambda file: file.write_text("a shopping list"),
    "a bit flipped": _flip,
    "a folder": _replace_by_folder,
    "a pipe": _replace_by_pipe,
    "of another mark": _json(lambda said: said.update(mark="0" * 64)),
    "without nodes": _json(lambda said: said.update(nodes=[])),
    "nodes that are none": _json(lambda said: said.update(nodes=3)),
    "nothing": _json(lambda said: said.clear()),
    "another operation": _json(lambda said: said["nodes"][-1].__setitem__(0, "torch.os.system")),
    "an operation on files": _json(lambda said: said["nodes"][-1].__setitem__(0, "aten.from_file.default")),
    "an unknown dtype": _json(lambda said: said["nodes"][-1].__setitem__(4, {"dtype": "load"})),
    "from ahead": _json(lambda said: said["nodes"][-1].__setitem__(1, [{"value": 10**6}])),
    "another weight": _json(lambda said: said["nodes"][0].__setitem__(7, "nothing")),
    "a weight of another shape": _json(lambda said: said["nodes"][0].__setitem__(3, [1])),
    "no such output": _json(lambda said: said.update(outputs=[10**6])),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_no_program_is_made_anew(
    programs: Path, archived: tuple[Path, Program, torch.Tensor], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, program, wanted = archived
    (file,) = programs.iterdir()
    SPOILT[how](file)
    with pytest.raises(Anew):
        decode(make())
    monkeypatch.setattr(called_program, "capture", lambda *_: program)
    assert torch.equal(decode(make())[0].sample, wanted)
    monkeypatch.setattr(called_program, "capture", refuse)
    if file.is_file():  # which is whole again
        assert torch.equal(decode(make())[0].sample, wanted)
    assert [*programs.iterdir()] == [file]


def test_where_nothing_can_be_written_it_works_all_the_same(
    archived: tuple[Path, Program, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, program, wanted = archived
    file = tmp_path / "no folder"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr(called_program, "capture", lambda *_: program)
    result, notes = decode(make())
    assert torch.equal(result.sample, wanted)
    assert notes == []


def test_the_reason_why_there_is_none_is_kept_too(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Program:
        raise UnsupportedGraph("it looks at values")

    module, x = make(), X[:, :, :4]
    with torch.no_grad():
        wanted = module.decode(x).sample
    for capture in (fail, refuse):
        monkeypatch.setattr(called_program, "capture", capture)
        result, notes = decode(module, x)
        assert notes == ["decode runs whole: it looks at values"]
        assert torch.equal(result.sample, wanted)


def test_a_reason_that_may_pass_is_not_kept(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Program:
        exhausted = NotExported("no memory")
        exhausted.__cause__ = MemoryError()
        raise UnsupportedGraph("no memory") from exhausted

    monkeypatch.setattr(called_program, "capture", fail)
    assert decode(make(), X[:, :, :4])[1] == ["decode runs whole: no memory"]
    monkeypatch.setattr(called_program, "capture", refuse)
    with pytest.raises(Anew):
        decode(make(), X[:, :, :4])


# courses


def courses_of(module: nn.Module, strips: int = 10_000) -> list[StripPlan]:
    """Those that were found anew while `module` decoded."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            archive, "find_strip_plan", lambda *args, **how: found.append(find_strip_plan(*args, **how)) or found[-1]
        )
        decode(module, strips=strips)
    return found


def test_a_course_is_found_once_for_each_budget(programs: Path) -> None:
    assert courses_of(make()) == []  # it was kept
    assert len(courses_of(make(), 20_000)) == 1
    assert courses_of(make(), 20_000) == []


SPOILT_COURSES = {
    name: SPOILT[name] for name in ("cut short", "empty", "something else", "a bit flipped", "a pipe")
} | {
    "of another mark": _json(lambda said: said.update(mark="0" * 64), "strip_plan.json"),
    "nothing": _json(lambda said: said.clear(), "strip_plan.json"),
    "no such node": _json(lambda said: said["passes"][0][1].append(10**6), "strip_plan.json"),
}


@pytest.mark.parametrize("how", SPOILT_COURSES)
def test_what_is_no_course_is_found_anew(
    programs: Path, archived: tuple[Path, Program, torch.Tensor], how: str
) -> None:
    (file,) = (programs.parent / "strip_plans").iterdir()
    SPOILT_COURSES[how](file)
    assert len(courses_of(make())) == 1
    if file.is_file():  # which is whole again
        assert courses_of(make()) == []
    assert torch.equal(decode(make())[0].sample, archived[2])


@pytest.mark.parametrize("maps", ["device", "host", "recompute"])
def test_a_course_in_words_is_the_same_course(maps: FeatureMaps) -> None:
    program = program_of(8)
    strip_plan = find_strip_plan(program, 20_000, maps)
    read = strip_plan_from_json(json.loads(json.dumps(strip_plan_to_json(strip_plan))), program)
    assert (read.passes, read.in_host, read.peak) == (strip_plan.passes, strip_plan.in_host, strip_plan.peak)
    assert read.graph.level == strip_plan.graph.level


# files


def test_those_not_used_for_long_make_room(
    programs: Path, archived: tuple[Path, Program, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, double = archived[1], without_weights(make())
    (first,) = programs.iterdir()
    monkeypatch.setattr(archive, "MOST_BYTES", int(3.5 * first.stat().st_size))
    for age, name in enumerate("edcb"):
        kept_program(name, double, [X], lambda: program)
        os.utime(programs / f"{name}.zip", (age + 1, age + 1))
    os.utime(first, (0, 0))
    kept_program("c", double, [X], refuse)  # is used
    kept_program("a", double, [X], lambda: program)
    assert sorted(file.stem for file in programs.iterdir()) == ["a", "b", "c"]


def test_nothing_but_operations_of_aten_is_kept(programs: Path, archived: tuple[Path, Program, torch.Tensor]) -> None:
    known, double = archived[1], without_weights(make())
    others = [
        replace(known, nodes=(*known.nodes, Node("prims.sin.default", (Ref(0),), {}, (1,), torch.float32))),
        replace(known, nodes=(*known.nodes, Node("aten.sin.default", (print,), {}, (1,), torch.float32))),
        replace(known, constants={"table": torch.empty(3, device="meta")}),
    ]
    for place, program in enumerate(others):
        assert kept_program(f"{place}", double, [X], lambda program=program: program) is program
    assert len([*programs.iterdir()]) == 1


def test_a_program_in_words_is_the_same_program(archived: tuple[Path, Program, torch.Tensor]) -> None:
    args = (Ref(0), [Ref(1), None, True, 2, -0.5, float("-inf"), "mean"], torch.float16, torch.device("meta"))
    kwargs = {"memory_format": torch.channels_last, "layout": torch.strided, "nested": [[Ref(0)], []]}
    known = archived[1]
    odd = Node("aten.max.dim", args, kwargs, (0, 3), torch.bfloat16, 1, varying=True, name="odd", output=1)
    program = replace(known, nodes=(*known.nodes, odd))
    words = json.loads(json.dumps(program_to_json(program)))
    assert program_from_json(words, program.constants) == program
