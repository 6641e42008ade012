"""What others wrote is text on a terminal, whichever command shows it: it sets no colour and hides no line."""

from __future__ import annotations

import ast
import fcntl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from suite.cli import leaderboard, render
from suite.cli.options import Format
from suite.cli.render import column
from suite.leaderboard.fields import Row
from suite.plan.definition import driver_pid
from suite.record.folder import Home
from suite.storage.lease import Claim
from tests.commands import Suite, suite
from tests.records import make_spec, write_definition, write_trial
from tests.test_task_check import LABELS, copied, splits, write

__all__ = ["suite", "write"]
CLI = Path(render.__file__).parent
# A colour, and characters that turn the direction of writing: click takes the colour out of a pipe,
# so that a test sees the others alone.
ODD = "\x1b[31mX\x9b\u202e\u061c"
SHOWN = "\\x1b[31mX\\x9b\\u202e\\u061c"


def commands_in(text: str) -> set[str]:
    return set(text) & set(ODD) - set("[31mX")


# Each prints what no other person wrote, or what `printable` has been over.
BY_THEMSELVES = {
    "app.py: __version__",
    "reference.py: reference()",
    "task.py: styled + printable(rest)",
    # JSON in ASCII
    "trial.py: result.as_bytes().decode()",
}


def printed(file: Path) -> Iterator[str]:
    """What the calls of `print` and `typer.echo` in a file get, but for constants and JSON in ASCII."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("print", "typer.echo"):
            continue
        for value in node.args:
            text = ast.unparse(value)
            is_ascii = text.startswith("json.dumps(") and "ensure_ascii" not in text
            is_plain = isinstance(value, ast.Constant) or text.startswith("printable(")
            if not is_ascii and not is_plain:
                yield f"{file.name}: {text}"


def test_every_command_prints_by_put() -> None:
    files = [file for file in CLI.glob("*.py") if file.name != "render.py"]
    assert {line for file in files for line in printed(file)} == BY_THEMSELVES


@pytest.mark.parametrize("err", [False, True])
def test_put_and_say_print_no_command(err: bool, capsys: pytest.CaptureFixture[str]) -> None:
    render.put(f"one\n{ODD}", err=err)
    render.say(ODD, err=err)
    captured = capsys.readouterr()
    assert (captured.out, captured.err)[err] == f"one\n{SHOWN}\n{SHOWN}\n"


@pytest.mark.parametrize("fmt", [Format.TABLE, Format.MD])
def test_title_and_head_of_a_table_are_no_commands(
    fmt: Format, capsys: pytest.CaptureFixture[str]
) -> None:
    render.render([{"a": 1}], [column("a", ODD)], fmt, title=ODD)
    out = capsys.readouterr().out
    assert not commands_in(out)
    assert out.count("\\u202e") == 2


def test_the_head_of_a_table_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """A class of somebody's data is the head of a column."""
    heads = ("[/neg]", "[pos]", ":heart:")
    render.render([{"a": 1}], [column("a", head) for head in heads], Format.TABLE)
    out = capsys.readouterr().out
    assert all(head in out for head in heads)


def test_warnings_of_an_imported_row_are_no_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row(
        home="abc",
        sweep="demo",
        backbone="bert-base",
        method=ODD,
        task="sst2",
        arm="bert-base.pretrained.full.1f2e3d4c",
        status="partial",
        digest="d",
        looks_warning=ODD,
    )
    found = SimpleNamespace(hidden=0, rows=[row])
    monkeypatch.setattr("suite.tracking.query.chosen", lambda *_, **__: found)
    leaderboard.show("", fmt=Format.TABLE)
    out, err = capsys.readouterr()
    assert not commands_in(out + err)
    assert f"warning: {SHOWN} on sst2: {SHOWN}" in err


def test_a_file_that_the_system_refuses_is_named_without_commands(
    suite: Suite, tmp_path: Path
) -> None:
    home = Home(tmp_path)
    write_definition(home, ["lora"], ["agreement"])
    spec = home.trial(write_trial(home, make_spec("lora"))).path.with_name(ODD) / "spec.json"
    spec.parent.mkdir()
    spec.symlink_to(spec.name)
    code, out, err = suite("status", "--home", home.path)
    assert (code, commands_in(out + err)) == (1, set())
    assert f"/{SHOWN}/spec.json" in err


@pytest.mark.parametrize(("pid", "known"), [("7", 7), (f'"{ODD}"', None), ("[7]", None)])
def test_a_drivers_process_is_a_number(tmp_path: Path, pid: str, known: int | None) -> None:
    home = Home(tmp_path)
    definition = home.sweep_definition("demo")
    definition.parent.mkdir(parents=True)
    text = f'{{"pid": {pid}}}'.replace("\x1b", "\\u001b")
    definition.with_suffix(".driver").write_text(text)
    with definition.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert driver_pid(home, "demo") == known


def test_the_holder_of_a_sweep_is_named_without_commands() -> None:
    claim = Claim(id="x", host=ODD, pid=7, machine="m", started_s=1.0, beat_s=3.0, job=ODD)
    assert str(claim) == f"process 7 on {SHOWN} (job {SHOWN})"


def test_rows_of_a_task_are_no_commands(suite: Suite, write: Any) -> None:
    rows = splits(lambda n: n % 2)
    for texts in rows.values():
        texts["text"] = [f"{text} {ODD}" for text in texts["text"]]
    # a finding shows rows too
    copied("train", 12, into="test")(rows)
    file, root = write(LABELS, rows)
    _, out, err = suite("task", "check", file, "--data-root", root)
    assert not commands_in(out + err)
    assert f"train text 0 {SHOWN}" in out
