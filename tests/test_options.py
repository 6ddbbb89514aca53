"""The commands and options of the command line, frozen."""

from __future__ import annotations

from typer.main import get_command

from tightfit.cli import app

COMMANDS = {
    "calibrate": [
        "[MODEL]",
        "--budget",
        "--device",
        "--dtype",
        "--frames",
        "--guidance",
        "--height",
        "--json",
        "--negative-prompt",
        "--prompt",
        "--ram",
        "--steps",
        "--strategy",
        "--width",
    ],
    "chart": [
        "--cards",
        "--json",
        "--level-table",
        "--models",
        "--out",
        "--ram",
        "--usual-only",
    ],
    "machine": [
        "--json",
        "--refresh",
    ],
    "plan": [
        "[MODEL]",
        "--allow",
        "--backward",
        "--batch",
        "--budget",
        "--cache",
        "--card",
        "--cards-per-node",
        "--frames",
        "--guidance",
        "--height",
        "--json",
        "--level",
        "--link",
        "--negative-prompt",
        "--nodes",
        "--plan",
        "--quality",
        "--ram",
        "--set",
        "--steps",
        "--timeline",
        "--verbose",
        "--width",
    ],
    "run": [
        "[MODEL] PROMPT",
        "--allow",
        "--batch",
        "--budget",
        "--cache",
        "--device",
        "--dtype",
        "--frames",
        "--guidance",
        "--height",
        "--json",
        "--level",
        "--negative-prompt",
        "--out",
        "--plan",
        "--profile",
        "--quality",
        "--ram",
        "--seed",
        "--set",
        "--snapshot",
        "--steps",
        "--timeline",
        "--verbose",
        "--watch",
        "--width",
    ],
    "batch": [
        "[MODEL] PROMPTS",
        "--allow",
        "--batch",
        "--budget",
        "--cache",
        "--device",
        "--dtype",
        "--frames",
        "--guidance",
        "--height",
        "--json",
        "--level",
        "--negative-prompt",
        "--out",
        "--plan",
        "--quality",
        "--ram",
        "--ray",
        "--ray-address",
        "--seed",
        "--set",
        "--steps",
        "--verbose",
        "--width",
    ],
    "compare": [
        "[MODEL] PROMPT",
        "--allow",
        "--batch",
        "--budget",
        "--cache",
        "--device",
        "--dtype",
        "--frames",
        "--guidance",
        "--height",
        "--json",
        "--level",
        "--negative-prompt",
        "--out",
        "--plan",
        "--quality",
        "--ram",
        "--seed",
        "--set",
        "--steps",
        "--verbose",
        "--width",
    ],
    "export": [
        "[MODEL]",
        "--batch",
        "--component",
        "--device",
        "--dtype",
        "--frames",
        "--guidance",
        "--height",
        "--json",
        "--negative-prompt",
        "--out",
        "--width",
    ],
    "shard": [
        "SRC DST",
        "--component",
        "--config",
        "--dtype",
        "--json",
        "--max-shard-size",
        "--verify",
    ],
}


STATED = {"batch": 1, "max_shard_size": "2GB"}  # defaults that options state


def found() -> dict[str, list[str]]:
    commands = {}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        arguments = [str(p.metavar) for p in command.params if p.param_type_name == "argument"]
        options = [o for p in command.params if p.param_type_name == "option" for o in [*p.opts, *p.secondary_opts]]
        commands[name] = [*arguments, *sorted(options)]
    return commands


def test_the_commands_and_options_are_those_that_were_agreed() -> None:
    assert found() == COMMANDS, (
        "changing this list is changing the public face: somebody's script breaks with every option that goes or is "
        "renamed, and every option that comes stays for good. If it is meant, change COMMANDS, the README and the "
        "CHANGELOG together."
    )


def test_every_command_and_option_is_explained() -> None:
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert "Examples:" in command.help, f"tightfit {name} --help shows no examples"
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"tightfit {name}: {parameter.name} has no help text"


def test_options_left_out_leave_the_decision_to_the_request_and_the_plan() -> None:
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        options = [p for p in command.params if p.param_type_name == "option" and not p.required]
        decided = {p.name: p.default for p in options if p.default not in (None, False)}
        assert decided == {p.name: STATED[p.name] for p in options if p.name in STATED}
