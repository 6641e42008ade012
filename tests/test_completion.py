"""What a shell offers: names of methods, variants, tasks, backbones and sweeps, without importing what they name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer.core

from suite.attention import variants
from suite.backbones.presets import PRESETS
from suite.cli import complete
from suite.config.space import peft_spaces
from suite.config.task_files import task_paths
from suite.petl import methods
from suite.record.folder import Home
from tests.commands import ROOT, Suite, shell, suite
from tests.records import write_definition

__all__ = ["suite"]


def test_the_names_are_those_of_the_registries() -> None:
    assert complete.methods("") == sorted([*methods.names(), *peft_spaces()])
    assert complete.attention("") == variants.names()
    assert complete.backbones("") == sorted(PRESETS)
    assert complete.tasks("") == sorted(task_paths())
    assert complete.sweeps("quick") == ["quickstart"]


def test_a_method_of_the_users_own_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "petl").mkdir()
    (tmp_path / "petl" / "my_own.py").write_text(
        'raise RuntimeError("run")\nclass MyOwn:\n    description = "mine"\n'
    )
    (tmp_path / "petl" / "helper.py").write_text("def help_(): ...\n")
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    assert complete.methods("my") == ["my-own"]
    assert "helper" not in complete.methods("")


def test_tasks_of_the_working_folder_are_offered_where_the_commands_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own_code.py").write_text("TASK = {}\n")
    (tmp_path / "tasks" / "own-rows.yaml").write_text("name: own-rows\n")
    monkeypatch.chdir(tmp_path)
    assert complete.tasks("own") == ["own-rows"], "Python is not taken from the working folder"
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    assert complete.tasks("own") == ["own-code", "own-rows"]
    (tmp_path / "tasks" / "own_rows.py").write_text("TASK = {}\n")
    assert complete.tasks("") == [], "two files of one name"


def test_the_last_name_of_a_list_is_completed() -> None:
    assert complete.listed(complete.methods)("lora,re") == ["lora,read"]
    assert "lora,lora" not in complete.listed(complete.methods)("lora,")


def test_arms_and_cells_of_the_homes_sweeps_are_offered(tmp_path: Path) -> None:
    write_definition(Home(tmp_path), ["full", "lora"], ["agreement"])
    context = typer.Context(typer.core.TyperCommand("compare"))
    context.params["home"] = tmp_path
    assert complete.arms(context, "") == ["full", "lora"]
    assert complete.cells(context, "l") == ["lora/agreement"]
    (tmp_path / "sweeps" / "demo.json").write_text("{}")
    assert complete.arms(context, "") == [], "a definition that cannot be read offers nothing"


def asked(line: str) -> dict[str, str]:
    """What bash sets to ask what to offer after `line`."""
    number = len(line.split(" ")) - 1
    return {
        "_SUITE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(number),
    }


def test_a_process_answers_the_shell(tmp_path: Path) -> None:
    done = shell(cwd=tmp_path, **asked("suite lead"))
    assert (done.returncode, done.stdout.split()) == (0, ["leaderboard"]), done.stderr


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("suite run quick", ["quickstart"]),
        ("suite params --backbone t5-s", ["t5-small"]),
        ("suite trial --method lor", ["lora"]),
        ("suite leaderboard --sweep de", ["demo"]),
        ("suite leaderboard --home elsewhere --sweep ", ["other"]),
    ],
)
def test_bash_is_offered(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]
) -> None:
    for home, name in (("runs", "demo"), ("elsewhere", "other")):
        (tmp_path / home / "sweeps").mkdir(parents=True)
        (tmp_path / home / "sweeps" / f"{name}.json").touch()
    monkeypatch.chdir(tmp_path)
    for name, value in asked(line).items():
        monkeypatch.setenv(name, value)
    code, out, err = suite()
    assert (code, out.split()) == (0, offered), err


def test_completing_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from suite.cli import complete as c; c.methods(''), c.attention(''), c.tasks(''), c.backbones(''), c.sweeps('');"
        "print(sorted({'torch', 'transformers', 'ray', 'pandas', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_script_for_the_shell_is_shown(tmp_path: Path) -> None:
    # typer looks for the shell among the parents, and a test may have none. Bash would replace
    # itself by the last command.
    line = f"{sys.executable} -m suite --show-completion; exit $?"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "_SUITE_COMPLETE=complete_bash" in done.stdout
