"""Rules of the code base, read off its syntax: who imports whom, what is public, what is never used."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import tightfit
from tightfit import errors

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "tightfit"
FILES = sorted(SRC.rglob("*.py"))

# each may import from its own folder and from what stands to its left
ORDER = (
    "errors", "units", "progress", "signals", "sockets", "files", "schema", "catalog", "demo", "report", "simulator",
    "devices", "measure", "plan", "apply", "checkpoint", "run", "terminal", "command_options",
    "batch_command", "calibrate_command", "checkpoint_commands", "compare_command", "cli", "__main__",
)  # fmt: skip
# all that plan and report may see
PURE = {"errors", "units", "schema", "catalog"}

WITHOUT_TORCH = ["errors", "units", "report.summary"]
WITHOUT_TORCH += [
    ".".join(file.relative_to(SRC).with_suffix("").parts)
    for folder in ("schema", "plan")
    for file in (SRC / folder).glob("[!_]*.py")
]

LONGEST_FILE, LONGEST_UNEXPLAINED = 300, 60
# the most it may have; a file that has shrunk below LONGEST_FILE leaves this list
STILL_LONGER: dict[str, int] = {}

SWITCHES = {"enable_progress_bar"}  # of a library's logging, not of its memory

# messages without a number or a name of the case at hand: there is none to give
PLAIN_MESSAGES = {
    "a budget needs device bytes, RAM bytes or both, e.g. Budget(device='8GB')",
    "fit takes exactly one of level=0…3 and plan=…",
    "the prompt is empty: say what to draw, e.g. 'a red circle on the left'",
    "there is nothing to report yet: call the pipeline first",
    "undo() in the middle of a call: let it end first",
}


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def where(file: Path, node: ast.expr | ast.stmt) -> str:
    return f"{file.relative_to(SRC)}:{node.lineno}"


def every(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[Path, ast.AST]]:
    return ((file, node) for file in FILES for node in ast.walk(tree(file)) if isinstance(node, kind))


def dotted(node: ast.AST) -> str:
    """'torch.cuda.synchronize' of the expression that says so; '' for what is no dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    inside = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inside}.{node.attr}" if inside and isinstance(node, ast.Attribute) else ""


def imported(file: Path, node: ast.AST) -> list[str]:
    """Every name that an import could bring, dotted and absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    store = ["tightfit", *file.relative_to(SRC).parts][: -node.level] if node.level else []
    module = ".".join([*store, *([node.module] if node.module else [])])
    return [f"{module}.{alias.name}" for alias in node.names]


def part(file: Path) -> str:
    """The file or folder directly under src/tightfit that `file` belongs to."""
    return file.relative_to(SRC).parts[0].removesuffix(".py")


# who imports whom


@pytest.mark.parametrize("name", sorted({part(file) for file in FILES} - {"__init__"}))
def test_every_part_has_its_place_in_the_order(name: str) -> None:
    assert name in ORDER, f"src/tightfit/{name}: give it a place in ORDER, and in docs/architecture/index.md"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_imports_go_one_way(file: Path) -> None:
    own = part(file)
    if own == "__init__":
        return
    pure = PURE | {own} | ({"files"} if own == "report" else set())
    allowed = pure if own in {"plan", "report"} else {*ORDER[: ORDER.index(own) + 1]}
    for node in ast.walk(tree(file)):
        for name in imported(file, node):
            first, _, rest = name.partition(".")
            assert first != "tightfit" or rest.partition(".")[0] in allowed, (
                f"{where(file, node)} imports {name}: {own} may import only {', '.join(sorted(allowed))}"
            )


def test_what_plans_and_reports_loads_no_torch() -> None:
    code = (
        "import importlib, sys, types\n"
        "package = types.ModuleType('tightfit')\n"  # the real one is the public face, which has to import everything
        "package.__path__ = [sys.argv[1]]\n"
        "sys.modules['tightfit'] = package\n"
        "for name in sys.argv[2:]:\n"
        "    importlib.import_module(f'tightfit.{name}')\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    assert "plan.presets" in WITHOUT_TORCH
    command = [sys.executable, "-c", code, str(SRC), *WITHOUT_TORCH]
    assert subprocess.run(command, check=False, capture_output=True, text=True).stderr == ""


def test_only_devices_touch_torch_cuda() -> None:
    for file, node in every((ast.Import, ast.ImportFrom, ast.Attribute)):
        if part(file) == "devices":
            continue
        for name in [*imported(file, node), dotted(node)]:
            assert not f"{name}.".startswith("torch.cuda."), f"{where(file, node)} uses {name}: that is for devices/"


# what is public


def sorted_names(names: list[str]) -> list[str]:
    """As ruff's RUF022 sorts: SCREAMING_CASE, then CamelCase, then the rest."""
    return sorted(names, key=lambda n: (0 if len(n) > 1 and n.isupper() else 1 if n[0].isupper() else 2, n))


def public_names(file: Path) -> list[str] | None:
    for node in tree(file).body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def bound_names(file: Path) -> set[str]:
    """What the top level of a module defines or imports."""
    names: set[str] = set()
    for node in tree(file).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Assign():
                names |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            case ast.AnnAssign():
                names.add(dotted(node.target))
    return names


def test_public_names_are_sorted_and_exist() -> None:
    lists = {file: names for file in FILES if (names := public_names(file)) is not None}
    assert len(lists) > 10
    for file, names in lists.items():
        assert names == sorted_names(names), f"{file.relative_to(SRC)}: __all__ should be {sorted_names(names)}"
        assert len(names) == len(set(names)), f"{file.relative_to(SRC)}: __all__ names something twice"
        if file == SRC / "__init__.py":
            continue  # looked up when asked for: tested below
        assert set(names) <= bound_names(file), f"{file.relative_to(SRC)} has no {set(names) - bound_names(file)}"


def test_the_public_face_is_imports_and_all_and_nothing_else() -> None:
    docstring, *imports, typed, names, modules, lookup = tree(SRC / "__init__.py").body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert isinstance(typed, ast.If)  # what is public, for type checkers: at run time it is loaded when asked for
    assert all(isinstance(node, ast.ImportFrom) for node in typed.body)
    assert isinstance(names, ast.Assign)
    assert dotted(names.targets[0]) == "__all__"
    assert isinstance(modules, ast.Assign)
    assert isinstance(lookup, ast.FunctionDef)
    assert lookup.name == "__getattr__"
    assert tightfit.__all__ == sorted_names(tightfit.__all__)
    assert set(tightfit.__all__) == {alias.name for node in typed.body for alias in node.names}
    assert all(hasattr(tightfit, name) for name in tightfit.__all__)
    assert not hasattr(tightfit, "no_such_name")


def members(public: type) -> Iterator[tuple[str, object]]:
    """Yield the methods and properties that the class defines itself, private ones excepted."""
    for name, value in vars(public).items():
        function = getattr(value, "__func__", value)  # of a classmethod
        if not name.startswith("_") and isinstance(function, (property, functools.cached_property, FunctionType)):
            yield f"{public.__name__}.{name}", function


def test_everything_public_has_its_own_docstring() -> None:
    public = [(name, getattr(tightfit, name)) for name in tightfit.__all__]
    for name, each in public:
        inherited = isinstance(each, type) and not vars(each)["__doc__"]
        assert each.__doc__, name
        assert not inherited, name
    inside = [member for _, each in public if isinstance(each, type) for member in members(each)]
    assert len(inside) >= 40
    assert not [name for name, each in inside if not each.__doc__]


def test_help_needs_no_torch() -> None:
    program = "import sys, tightfit.cli; assert not {'torch', 'diffusers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("file", [*SRC.glob("*/__init__.py")], ids=lambda file: file.parent.name)
def test_a_folder_says_what_it_takes_returns_and_never_does(file: Path) -> None:
    said = (ast.get_docstring(tree(file)) or "").lower()
    assert all(word in said for word in ("take", "return", "never")), f"{file.parent.name}/__init__.py: {said!r}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_modules_are_named_after_what_they_hold(file: Path) -> None:
    vague = {"util", "utils", "helper", "helpers", "manager", "managers", "common", "misc"}
    assert not vague & set(re.split(r"[/_.]", str(file.relative_to(SRC))))


# words


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for file, node in every(ast.ClassDef):
        places.setdefault(node.name.lstrip("_"), []).append(where(file, node))
    assert not {name: found for name, found in places.items() if len(found) > 1}


PRIVATE_WORDS = (  # words that only this project used, and what says the same
    "parcel: weight group", "cargo: weights", "shelf: weights in files", "stint: run", "guest: activation",
    "lap: stage", "pupil: recorder", "berth: slot", "depot: host pool", "aboard: on the device", "pretend: simulated",
    "rehears: simulate", "hollow: valueless", "grain: granularity", "crew: co-resident group", "sketch: candidate",
    "menu: option set", "giant: oversized layer", "soonest: lower bound", "master: source parameter", "race: search",
    "survey: profiler", "lesson: measurement", "visitor: workload", "shed: evict", "whence: from",
)  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_no_private_words(file: Path) -> None:
    words = {word.partition(":")[0] for word in PRIVATE_WORDS}
    text = re.sub(r"\bMASTER_(ADDR|PORT)\b", "", file.read_text())  # torch's environment variables
    found = set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()))
    bad = {
        word for word in found for private in words if word in (private, f"{private}s") or word.startswith("rehears")
    }
    assert not bad, f"{file.relative_to(SRC)}: {bad}; say {[w for w in PRIVATE_WORDS if w.partition(':')[0] in bad]}"


# what is never used


def test_nothing_runs_code_from_data() -> None:
    for file, node in every((ast.Import, ast.ImportFrom, ast.Attribute)):
        for name in [*imported(file, node), dotted(node)]:
            roots = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
            assert name.partition(".")[0] not in roots, f"{where(file, node)} uses {name}"
            assert name not in {"torch.load", "builtins.eval", "builtins.exec"}, f"{where(file, node)} uses {name}"
    for file, node in every(ast.Name):
        assert node.id not in {"eval", "exec", "compile", "__import__"}, f"{where(file, node)} uses {node.id}"


def test_no_memory_switch_of_diffusers_is_thrown() -> None:
    """enable_model_cpu_offload() and its kind: what they do is done here, by the plan."""
    for file, node in every((ast.Attribute, ast.Constant)):
        name = node.attr if isinstance(node, ast.Attribute) else str(node.value)
        switch = re.fullmatch(r"(enable|disable)_\w+", name)
        twin = name.replace("disable_", "enable_")
        assert not switch or twin in SWITCHES, f"{where(file, node)} throws {name}"


# what is said


def error_calls() -> Iterator[tuple[Path, ast.Call]]:
    """Every error of ours that is made anywhere: by its class, or as `cls.error(…)` in a record."""
    ours = {name for name in errors.__all__ if name[0].isupper()}
    for file, node in every(ast.Call):
        name = dotted(node.func)
        if name.rpartition(".")[2] in ours or name in {"cls.error", "self.error"}:
            yield file, node


def plain_message(file: Path, call: ast.Call) -> str | None:
    """The message, where it is the same whatever happened."""
    message: ast.expr = call.args[0] if call.args else ast.Constant("")
    said = [message]
    if isinstance(message, ast.Name):  # a variable: what is put into it
        assignments = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Assign)]
        said = [node.value for node in assignments if dotted(node.targets[0]) == message.id]
    for value in said:
        if not any(isinstance(node, ast.FormattedValue | ast.Call) for node in ast.walk(value)):
            return "".join(str(node.value) for node in ast.walk(value) if isinstance(node, ast.Constant))
    return None if said else ast.unparse(message)


def test_messages_carry_the_numbers_and_names_of_the_case() -> None:
    plain = {message: where(*found) for found in error_calls() if (message := plain_message(*found)) is not None}
    for message, place in plain.items():
        assert message in PLAIN_MESSAGES, f"{place}: {message!r} says nothing of the case at hand: with which values?"
    assert set(plain) == PLAIN_MESSAGES, "PLAIN_MESSAGES lists a message that nobody gives any more"


def test_no_error_of_ours_is_raised_without_a_message() -> None:
    ours = {name for name in errors.__all__ if name[0].isupper()}
    for file, node in every(ast.Raise):
        assert dotted(node.exc).rpartition(".")[2] not in ours if node.exc else True, f"{where(file, node)}: no message"


def test_the_tree_in_the_docstring_of_errors_is_the_tree() -> None:
    introduction, _, drawing = (errors.__doc__ or "").partition("\n\n")
    assert introduction
    above, drawn = ["Exception"], []
    for line in drawing.splitlines():
        branch, name, also = re.match(r"([│├└─ ]*)(\w+)(?: \((\w+)\))?", line).groups()  # type: ignore[union-attr]
        depth = len(branch) // 4 + 1
        kind = getattr(errors, name)
        assert [base.__name__ for base in kind.__bases__] == [above[depth - 1], *([also] if also else [])]
        assert "exit code" not in line or line.endswith(f"exit code {kind.exit_code}")
        above[depth:] = [name]
        drawn.append(name)
    assert sorted(drawn) == [name for name in errors.__all__ if name[0].isupper()]


# how long things are


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    body = lines[function.lineno - 1 : function.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in body)


def test_long_functions_are_explained() -> None:
    for file, node in every((ast.FunctionDef, ast.AsyncFunctionDef)):
        length = code_lines(node, file.read_text().splitlines())
        assert length <= LONGEST_UNEXPLAINED or ast.get_docstring(node), (
            f"{where(file, node)} {node.name}: {length} lines"
        )


def test_files_stay_short() -> None:
    lengths = {str(file.relative_to(SRC)): len(file.read_text().splitlines()) for file in FILES}
    for name, length in lengths.items():
        most = STILL_LONGER.get(name, LONGEST_FILE)
        assert length <= most, f"src/tightfit/{name} has {length} lines, more than {most}: it holds more than one noun"
    assert all(lengths[name] > LONGEST_FILE for name in STILL_LONGER), "STILL_LONGER lists a file that has become short"


def test_nothing_names_a_folder_of_the_machine_it_was_written_on() -> None:
    private = [f"/{name}/".encode() for name in ("work", "root")] + [b"/tmp/" + b"venv"]
    files = [ROOT / "README.md"]
    files += [path for folder in ("src", "docs", "tests", "tools") for path in (ROOT / folder).rglob("*")]
    checked = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    assert len(checked) > 50
    for path in checked:
        content = path.read_bytes()
        assert not any(name in content for name in private), f"{path.relative_to(ROOT)} names a private folder"
