"""Exported denoisers: the same numbers without the code, from a file without weights; what differs is refused."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from inspection import assert_same, imprint, relative_error
from more_pipelines import MORE_CASES
from simulator.conftest import ACCELERATOR
from tightfit import fit
from tightfit.apply.activations.export_denoiser import export_denoiser, export_module, find_denoiser
from tightfit.apply.activations.exported.compiled import CompiledProgram
from tightfit.apply.activations.exported.file import ExportedFile
from tightfit.apply.activations.exported.graph import Operation
from tightfit.apply.activations.exported.program import exported_forward
from tightfit.apply.method_overrides import override_class_members
from tightfit.apply.module_hooks import watch
from tightfit.checkpoint.loading import load_pipeline
from tightfit.errors import AlreadyFitted, InputError, ModelError, PlanError, RequestError, RunError
from tightfit.run.models import find_model
from tightfit.simulator.backend import use_cards
from tightfit.simulator.card import SimulatedCard
from tightfit.simulator.timeline import Host
from tiny_pipelines import CASES, TinyCase, run

PIXART = next(case for case in MORE_CASES if case.name == "PixArtSigma")


class Net(nn.Module):
    """A small network with what denoisers have: settings, nested inputs, a table of its own, a number alone."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.config = {"width": width, "_name_or_path": "somewhere"}
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.gain = 2.0
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, added: Any = None, scale: float = 1.0
    ) -> tuple[torch.Tensor]:
        x = self.into(sample).flatten(2).transpose(1, 2) + timestep * self.table
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.gain * scale
        if added is not None:
            x = x.masked_fill(added["mask"], -float("inf")).softmax(1)
        return (x.flatten(1),)


def net(width: int = 8) -> Net:
    torch.manual_seed(0)
    return Net(width).eval()


def inputs(side: int = 4, **others: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    mask = torch.rand(1, side * side, 1) > 0.5
    return {"sample": torch.randn(1, 3, side, side), "timestep": torch.tensor(3), "added": {"mask": mask}} | others


@pytest.fixture(scope="module")
def exported_file() -> ExportedFile:
    """Of Net, for `inputs()`."""
    return export_module(net(), **inputs())


@pytest.fixture
def file(exported_file: ExportedFile, tmp_path: Path) -> Path:
    exported_file.save(tmp_path / "net.traced")
    return tmp_path / "net.traced"


def forward_of(module: nn.Module, exported_file: ExportedFile) -> Callable[..., Any]:
    forward = exported_forward(module, exported_file)
    return lambda *args, **kwargs: forward(module, *args, **kwargs)


# the same numbers

DRAW = """
import sys, torch
from tightfit.apply.activations.exported.file import ExportedFile
from tightfit.apply.activations.exported.program import exported_forward
from tightfit.apply.method_overrides import override_class_members
from tightfit.checkpoint.loading import load_pipeline
from tightfit.run.models import find_model
pipe = load_pipeline(find_model(None), torch.float32)
pipe.set_progress_bar_config(disable=True)
forward = exported_forward(pipe.unet, ExportedFile.load(sys.argv[1]))
del type(pipe.unet).forward  # nobody's now
override_class_members(pipe.unet, forward=forward)
call = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(5), "output_type": "pt"}
sys.stdout.buffer.write(pipe("a large red circle", **call).images.numpy().tobytes())
"""


def test_exported_here_and_loaded_elsewhere_it_draws_the_demo_picture(tmp_path: Path) -> None:
    pipe: Any = load_pipeline(find_model(None), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a large red circle", "num_inference_steps": 3, "output_type": "pt"}
    before, state = imprint(pipe.unet), torch.get_rng_state()
    exported_file = export_denoiser(pipe, call)
    assert_same(before, imprint(pipe.unet))
    assert torch.equal(torch.get_rng_state(), state)
    exported_file.save(tmp_path / "demo.traced")
    assert (tmp_path / "demo.traced").stat().st_size < 50_000  # the weights are 13.8 MB
    command = [sys.executable, "-c", DRAW, str(tmp_path / "demo.traced")]
    drawn = subprocess.run(command, check=False, capture_output=True)
    assert drawn.returncode == 0, drawn.stderr.decode()
    assert drawn.stdout == pipe(**call, generator=torch.Generator().manual_seed(5)).images.numpy().tobytes()

    override_class_members(pipe.unet, forward=exported_forward(pipe.unet, exported_file))
    taken = r"sample is float32 \(2, 4, 8, 8\), the exported denoiser takes float32 \(2, 4, 16, 16\): export it again"
    with pytest.raises(RequestError, match=taken):
        pipe(**call, height=64, width=64)
    with pytest.raises(RequestError, match=r"sample is float32 \(4, 4, 16, 16\)"):
        pipe(**call, num_images_per_prompt=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case for case in (*CASES, *MORE_CASES) if case.name not in ("QwenImage", "HiDreamImage")],
    ids=lambda case: case.name,
)
def test_pictures_are_those_of_the_code(case: TinyCase, tmp_path: Path) -> None:
    pipe: Any = case.make()
    file = tmp_path / "case.traced"
    export_denoiser(pipe, case.call()).save(file)
    module, wanted = find_denoiser(pipe), run(pipe, case)
    override_class_members(module, forward=exported_forward(module, ExportedFile.load(file)))
    assert torch.equal(run(pipe, case), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("QwenImage", RequestError, "encoder_hidden_states is float32"),  # prompts are not padded to one length
        ("HiDreamImage", ModelError, r"cannot be exported: .*numpy"),  # which expert works depends on numbers
    ],
)
def test_what_falls_short_is_refused(name: str, error: type[Exception], message: str) -> None:
    case = next(case for case in MORE_CASES if case.name == name)
    pipe: Any = case.make()

    def draw() -> None:
        module = find_denoiser(pipe)
        override_class_members(module, forward=exported_forward(module, export_denoiser(pipe, case.call())))
        run(pipe, case)

    with pytest.raises(error, match=message):
        draw()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_may_be_given_by_position_or_by_name(dtype: torch.dtype) -> None:
    module = net().to(dtype)
    given = inputs()
    given["sample"] = given["sample"].to(dtype)
    run_it = forward_of(module, export_module(module, **given))
    with torch.no_grad():
        wanted = module(**given)[0]
        assert torch.equal(run_it(*given.values())[0], wanted)
        assert torch.equal(run_it(scale=1.0, **given)[0], wanted)
        assert torch.equal(run_it(**given | {"timestep": torch.tensor(9)})[0], module(**given | {"timestep": 9})[0])


def test_whoever_asks_for_the_signature_gets_that_of_the_code(exported_file: ExportedFile) -> None:
    module = net()
    wanted = inspect.signature(module.forward)
    override_class_members(module, forward=exported_forward(module, exported_file))
    assert inspect.signature(module.forward) == wanted


def test_the_live_weights_are_used(exported_file: ExportedFile) -> None:
    module = net()
    run_it = forward_of(module, exported_file)
    with torch.no_grad():
        module.blocks[1].weight.mul_(3)
        module.blocks[2].weight = nn.Parameter(torch.eye(8))
        module.table = torch.ones(8)
        assert torch.equal(run_it(**inputs())[0], module(**inputs())[0])


def test_a_weight_with_two_names_is_one() -> None:
    module = net()
    module.blocks[2].weight = module.blocks[0].weight
    run_it = forward_of(module, export_module(module, **inputs()))
    with torch.no_grad():
        module.blocks[0].weight.mul_(2)
        assert torch.equal(run_it(**inputs())[0], module(**inputs())[0])


def test_gradients_are_those_of_the_code(exported_file: ExportedFile) -> None:
    ours, theirs = net(), net()
    forward_of(ours, exported_file)(**inputs())[0].square().sum().backward()
    theirs(**inputs())[0].square().sum().backward()
    assert torch.equal(ours.into.weight.grad, theirs.into.weight.grad)


def test_exported_without_a_card_it_runs_on_one(exported_file: ExportedFile) -> None:
    module, given = net(), inputs()
    wanted = module(**given)[0]
    use_cards([SimulatedCard(0, ACCELERATOR, Host(), "real")])
    try:
        there = tree_map_only(
            torch.Tensor, lambda tensor: tensor.to("privateuseone:0") if tensor.ndim else tensor, given
        )
        drawn = forward_of(module.to("privateuseone:0"), exported_file)(**there)[0]
        assert drawn.device.type == "privateuseone"
        assert torch.equal(drawn.cpu(), wanted)
    finally:
        use_cards(())


@pytest.fixture(scope="module")
def pixart() -> tuple[Any, ExportedFile]:
    """A tiny pipeline and its exported denoiser."""
    pipe = PIXART.make()
    return pipe, export_denoiser(pipe, PIXART.call())


@pytest.mark.parametrize(
    "chosen", [{"offload_to": "disk"}, {"granularity": "block"}, {"storage": "float8_e4m3fn"}], ids=str
)
def test_weights_that_stream_come_as_they_do_for_the_code(
    pixart: tuple[Any, ExportedFile], chosen: dict[str, str]
) -> None:
    pipe, exported_file = pixart
    forward = exported_forward(pipe.transformer, exported_file)
    plan = {"components": {"transformer": {"placement": "stream", **chosen}}}
    seen = []
    for ours in (False, True):
        fitted = fit(pipe, plan=plan, device="loopback", count_activations=False)
        reveal = override_class_members(pipe.transformer, forward=forward) if ours else lambda: None
        pictures = [run(pipe, PIXART) for _ in range(2)]
        phase = next(phase for phase in fitted.report().trace.phases if phase.name == "denoise")
        seen.append((pictures, phase.on_demand, phase.bytes_in))
        reveal()
        fitted.undo()
    (theirs, *moved), (ours_drawn, *moved_by_us) = seen
    assert all(torch.equal(ours, picture) for ours, picture in zip(ours_drawn, theirs, strict=True))
    assert moved_by_us == moved
    assert moved[0] == 0
    assert moved[1] > 0


def test_those_who_wait_for_a_module_are_told_once_for_each_time(exported_file: ExportedFile) -> None:
    module, told, undo = net(), [], ExitStack()

    def tell(said: str) -> Callable[[], None]:
        return lambda: told.append(said)

    run_it = forward_of(module, exported_file)
    for place, block in enumerate(module.blocks):
        watch(block, tell(f"before {place}"), tell(f"after {place}"), undo.callback)
    run_it(**inputs())
    assert told == [f"{when} {place}" for place in range(3) for when in ("before", "after")]
    del told[:]
    module.blocks[1].weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(RuntimeError):
        run_it(**inputs())
    assert told == ["before 0", "after 0", "before 1", "after 1"]  # also where it went wrong


# what differs is refused by name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": torch.zeros(1, 3, 8, 8)}, r"sample is float32 \(1, 3, 8, 8\), .* takes float32 \(1, 3, 4, 4\)"),
        ({"sample": torch.zeros(1, 3, 4, 4).half()}, r"sample is float16 \(1, 3, 4, 4\), .* takes float32"),
        ({"timestep": 3}, r"timestep is 3, the exported denoiser takes int64 \(\)"),
        ({"added": None}, r"added.mask is not given, the exported denoiser takes bool"),
        ({"added": {"mask": torch.ones(1, 16, 1).bool(), "more": None}}, "added.more is None, .* takes not given"),
        ({"scale": 2.0}, r"scale is 2.0, the exported denoiser takes 1.0"),
        ({"scale": torch}, "scale is of type module"),
        ({"sample": torch.zeros(1, 3, 4, 4, device="meta")}, "added.mask is on cpu, .* first is on meta"),
    ],
)
def test_another_call_is_refused_by_name(exported_file: ExportedFile, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        forward_of(net(), exported_file)(**inputs() | change)


def _with(attribute: str, value: object) -> Callable[[Net], None]:
    return lambda module: setattr(module, attribute, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module.config.update(width=9), "with Net.config.width = 8, and here it is 9"),
        (_with("into", nn.Conv2d(3, 8, 5).eval()), r"Net.into.weight = float32 \(8, 3, 3, 3\), and here .*5, 5"),
        (_with("more", nn.Linear(1, 1).eval()), "Net.more.weight = nothing"),
        (lambda module: module.blocks.half(), "Net.blocks.0.weight = float32 .* float16"),
        (_with("gain", 3.0), "the settings of Net = Net"),
        (lambda module: module.blocks.append(nn.ReLU().eval()), "the settings of Net.blocks.3 = nothing, .* ReLU"),
    ],
)
def test_another_network_is_refused_by_what_differs(
    exported_file: ExportedFile, change: Callable[[Net], None], message: str
) -> None:
    module = net()
    change(module)
    with pytest.raises(ModelError, match=message):
        exported_forward(module, exported_file)


def test_where_it_comes_from_makes_no_difference(exported_file: ExportedFile) -> None:
    module = net()
    module.config["_name_or_path"] = "elsewhere"
    exported_forward(module, exported_file)


@pytest.mark.parametrize("library", ["torch", "diffusers", "tightfit"])
def test_another_version_is_refused(exported_file: ExportedFile, library: str) -> None:
    older = exported_file.manifest.model_copy(update={"versions": exported_file.manifest.versions | {library: "0.0.1"}})
    with pytest.raises(ModelError, match=rf"exported with {library} = 0\.0\.1, and here it is \d.*: export it again"):
        exported_forward(net(), ExportedFile(older, exported_file.graph, {}))
    assert "+" not in exported_file.manifest.versions["torch"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda module: module.train(), ModelError, "Net is in training"),
        (lambda module: module.blocks[1].register_forward_hook(print), ModelError, "Net.blocks.1 has hooks"),
        (_with("forward", print), ModelError, "Net has hooks"),
        (lambda module: module.compile(backend="eager"), ModelError, "Net is compiled"),
        (lambda module: fit(module, level=0, device="cpu"), AlreadyFitted, "Net follows a plan"),
    ],
)
def test_what_is_in_the_way_is_said(
    exported_file: ExportedFile, change: Any, error: type[Exception], message: str
) -> None:
    module = net()
    change(module)
    for work in (lambda: export_module(module, **inputs()), lambda: exported_forward(module, exported_file)):
        with pytest.raises(error, match=message):
            work()


def test_a_hook_that_came_later_is_not_passed_over(exported_file: ExportedFile) -> None:
    module = net()
    run_it = forward_of(module, exported_file)
    module.blocks[0].register_forward_hook(print)
    with pytest.raises(RunError, match="a hook was set on a Linear"):
        run_it(**inputs())


# what cannot be exported


class Odd(nn.Module):
    def forward(self, x: torch.Tensor, how: str) -> Any:
        if how == "dict":
            return {"x": x}
        if how == "data":
            return x if x.sum() > 0 else -x
        if how == "custom":
            return torch.ops.tightfit_tests.twice(x)
        return x.numpy()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dict", "Odd returns a dict"),
        ("data", "Odd cannot be exported: .*data-dependent"),
        ("custom", "uses tightfit_tests.twice.default, which is no operation of ATen"),
        ("numpy", "Odd cannot be exported"),
    ],
)
def test_what_cannot_be_exported_is_said(how: str, message: str) -> None:
    with torch.library._scoped_library("tightfit_tests", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        with pytest.raises(ModelError, match=message):
            export_module(Odd().eval(), torch.ones(2), how)


def test_a_denoiser_that_is_not_there_or_not_called_is_said(pixart: tuple[Any, ExportedFile]) -> None:
    pipe, _ = pixart
    with pytest.raises(PlanError, match="unknown component 'transfomer': did you mean 'transformer'"):
        export_denoiser(pipe, {}, "transfomer")
    with pytest.raises(ModelError, match="without its AutoencoderKL"):
        export_denoiser(pipe, PIXART.call() | {"output_type": "latent"}, "vae")


# the file


def test_what_is_read_is_what_was_written(exported_file: ExportedFile, file: Path) -> None:
    again = ExportedFile.load(file)
    assert again.manifest == exported_file.manifest
    assert again.graph == exported_file.graph
    assert zipfile.ZipFile(file).namelist() == ["manifest.json", "graph.json", "constants.safetensors"]
    first = file.read_bytes()
    again.save(file)
    assert file.read_bytes() == first


class Tabled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0], device=x.device)


def test_numbers_in_the_code_go_with_it(tmp_path: Path) -> None:
    module = Tabled().eval()
    export_module(module, torch.ones(3)).save(tmp_path / "tabled.traced")
    assert forward_of(module, ExportedFile.load(tmp_path / "tabled.traced"))(torch.ones(3)).tolist() == [1, 2, 3]


def _replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _rewritten(file: Path, name: str, content: str) -> None:
    parts = {part: zipfile.ZipFile(file).read(part) for part in zipfile.ZipFile(file).namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for part, old in parts.items():
            archive.writestr(part, content if part == name else old)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.unlink(), "cannot read .*No such file"),
        (_replace_by_pipe, "cannot read .*: it is no file, but a pipe"),
        (lambda file: file.write_text("not a zip"), "is no exported denoiser"),
        (lambda file: file.write_bytes(file.read_bytes()[:-200]), "is no exported denoiser, or not all of one"),
        (lambda file: zipfile.ZipFile(file, "w").close(), "no item named 'manifest.json'"),
        (lambda file: _rewritten(file, "manifest.json", "[]"), "has format None"),
        (lambda file: _rewritten(file, "manifest.json", '{"format": 99}'), "has format 99, and this .* reads format 1"),
        (lambda file: _rewritten(file, "manifest.json", '{"format": 1}'), "versions is missing from Manifest"),
        (lambda file: _rewritten(file, "graph.json", "{"), "is no exported denoiser"),
        (lambda file: _rewritten(file, "graph.json", '{"inputs": 3}'), "inputs must be a valid tuple"),
        (lambda file: _rewritten(file, "constants.safetensors", "xx"), "is no exported denoiser"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(file: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(file)
    with pytest.raises(ModelError, match=message):
        ExportedFile.load(file)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (Operation(op="torch.os.system", args=["true"]), "uses 'torch.os.system', which is no operation"),
        (Operation(op="aten.from_file.default", args=["x", True, 8]), "uses 'aten.from_file.default'"),
        (Operation(op="aten.__class__.mro", args=[]), "uses 'aten.__class__.mro'"),
        (Operation(op="aten.nothing_like_it.default", args=[]), "uses 'aten.nothing_like_it.default'"),
        (Operation(op="aten.neg.default", args=[{"value": 10**6}]), "uses value 1000000, which is not there"),
        (Operation(op="aten.neg.default", args=[{"value": -1}]), "uses value -1, which is not there"),
        (Operation(op="aten.neg.default", args=[{"dtype": "load"}]), "stands for nothing known"),
        (Operation(op="aten.neg.default", args=[{"device": "cuda"}]), "stands for nothing known"),
        (Operation(op="aten.neg.default", args=[{"value": 0}], inside="into.x"), "an unknown module, into.x"),
    ],
)
def test_a_graph_says_nothing_but_operations(exported_file: ExportedFile, operation: Operation, message: str) -> None:
    graph = exported_file.graph.model_copy(update={"operations": (*exported_file.graph.operations, operation)})
    with pytest.raises(ModelError, match=message):
        exported_forward(net(), ExportedFile(exported_file.manifest, graph, {}))


@pytest.mark.parametrize("what", ["inputs", "weights", "constants"])
def test_a_graph_uses_nothing_that_is_not_there(exported_file: ExportedFile, what: str) -> None:
    graph = exported_file.graph.model_copy(update={what: (*getattr(exported_file.graph, what), "another")})
    with pytest.raises(ModelError, match=f"uses an unknown {what[:-1]}, another"):
        exported_forward(net(), ExportedFile(exported_file.manifest, graph, {}))


def test_a_file_is_written_whole_or_not_at_all(
    exported_file: ExportedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"cannot write .*nowhere/net\.traced: No such file"):
        exported_file.save(tmp_path / "nowhere" / "net.traced")
    kept = tmp_path / "net.traced"
    kept.write_text("what was there")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(InputError, match="No space left"):
        exported_file.save(kept)
    assert [*tmp_path.iterdir()] == [kept]
    assert kept.read_text() == "what was there"


def test_the_graph_is_plain_json(file: Path) -> None:
    operations = json.loads(zipfile.ZipFile(file).read("graph.json"))["operations"]
    assert {"op": "aten.conv2d.default", "kwargs": {}, "inside": "into"}.items() <= operations[0].items()
    assert {"number": "-inf"} in [argument for operation in operations for argument in operation["args"]]


# compiled


class Line(nn.Module):
    """As little as can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).tanh()


def simulated_to_compile(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compiling takes half a minute: what it makes is as short as a file can be, and calls of it are the program's."""
    made: list[Any] = []

    def make(program: Any, *, package_path: IO[bytes]) -> None:
        package_path.write(b"whole")
        made.append(program)

    def load(path: str, device_index: int) -> Callable[..., Any]:
        if Path(path).read_text() != "whole":
            raise RuntimeError("not a package")
        module: Callable[..., Any] = made[-1].module()
        return module

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", make)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    return made


def check_compiled(folder: Path) -> None:
    """Compiled once, it is loaded from then on, and works on the live weights."""
    module, x = Line().eval(), torch.tensor([[0.1, 0.2]])
    exported_file = export_module(module, x)
    for weights in ([2.0, 3.0], [-1.0, 0.5]):
        compiled = CompiledProgram(exported_file, folder)
        forward = exported_forward(module, exported_file, compiled)
        with torch.no_grad():
            module.weight = nn.Parameter(torch.tensor(weights))
            torch.testing.assert_close(forward(module, x), module(x))
        assert (compiled.seconds > 0) == (weights[0] == 2.0)
    assert [file.suffix for file in folder.iterdir()] == [".pt2"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_compiled_once_it_is_kept_where_nobody_else_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, folder = simulated_to_compile(monkeypatch), tmp_path / "cache" / "compiled"
    check_compiled(folder)
    assert len(made) == 1

    module, x = Line().eval(), torch.tensor([[0.1, 0.2]])
    exported_file = export_module(module, x)
    [file] = folder.iterdir()
    file.write_text("half")
    forward = exported_forward(module, exported_file, CompiledProgram(exported_file, folder))
    with pytest.raises(RunError, match="could not be loaded and was removed, try again: not a package"):
        forward(module, x)
    torch.testing.assert_close(forward(module, x), module(x))
    assert len(made) == 2

    _replace_by_pipe(file)
    with pytest.raises(
        RunError, match=r"cannot read .*\.pt2: it is no file, but a pipe, a device or the like: remove it"
    ):
        exported_forward(module, exported_file, CompiledProgram(exported_file, folder))(module, x)

    folder.chmod(0o770)
    with pytest.raises(RunError, match="may be written to by others"):
        exported_forward(module, exported_file, CompiledProgram(exported_file, folder))(module, x)


@pytest.mark.slow
def test_compiled_by_a_compiler(tmp_path: Path) -> None:
    check_compiled(tmp_path / "cache" / "compiled")


def test_compiled_code_takes_plain_weights_only(tmp_path: Path) -> None:
    module = net()
    plan = {"components": {"model": {"storage": "float8_e4m3fn", "skip_patterns": []}}}
    exported_file = export_module(module, **inputs())
    forward = exported_forward(module, exported_file, CompiledProgram(exported_file, tmp_path))
    fitted = fit(module, plan=plan, device="cpu", count_activations=False)
    with pytest.raises(PlanError, match=r"into\.weight is a Float8Weight, and compiled code takes weights as loaded"):
        forward(module, **inputs())
    fitted.undo()
    assert [*tmp_path.iterdir()] == []


def test_where_nothing_compiles_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler\nfound")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", none)
    module = Line().eval()
    exported_file = export_module(module, torch.ones(2))
    with pytest.raises(RunError, match=r"Line cannot be compiled here: no C\+\+ compiler: leave compiled out"):
        exported_forward(module, exported_file, CompiledProgram(exported_file, tmp_path))(module, torch.ones(2))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_compiled_it_draws_nearly_the_demo_picture(tmp_path: Path) -> None:
    """About a minute and a half of compiling; differences are those of float32 sums in another order."""
    pipe: Any = load_pipeline(find_model(None), torch.float32)
    pipe.set_progress_bar_config(disable=True)

    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        call = {"num_inference_steps": 3, "generator": generator, "output_type": "pt"}
        return pipe("a large red circle", **call).images

    wanted = draw()
    exported_file = export_denoiser(pipe, {"prompt": "a large red circle"})
    override_class_members(
        pipe.unet, forward=exported_forward(pipe.unet, exported_file, CompiledProgram(exported_file, tmp_path))
    )
    assert relative_error(draw(), wanted) < 1e-4
