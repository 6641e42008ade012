"""The command line as a user meets it: what is printed where, which exit code, which words."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from suite.cli import main, render
from suite.cli.app import COMMANDS, PANELS
from suite.cli.options import SELDOM, Format
from suite.cli.render import Column, column
from suite.leaderboard.fields import NOT_VERIFIABLE, Row
from suite.report import values
from suite.report.text_table import fitting
from suite.stats.compare import NO_RANK
from tests.commands import Suite, suite

__all__ = ["suite"]
ROOT = Path(__file__).parents[1]


# Help, errors and exit codes


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_its_example(suite: Suite, name: str) -> None:
    code, out, _ = suite(name, "--help")
    assert code == 0
    assert f"Example: suite {name} " in " ".join(out.split())


def test_the_help_breaks_lines_where_the_terminal_ends(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in suite("init", "--help")[1].splitlines()]
    assert "leave open. It checks the answers before it writes." in lines
    assert "…" not in suite("task", "check", "--help")[1], "no word is cut"


def test_a_full_disk_is_said_in_a_sentence() -> None:
    command = [
        sys.executable,
        "-u",
        "-m",
        "suite",
        "list",
        "methods",
    ]  # unbuffered: the first line meets the full device
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=100,
            check=False,
        )
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: No space left on device; free some space and give the same command again; what had ended is kept\n"
    )


def test_the_help_has_every_command_in_a_group(suite: Suite) -> None:
    grouped = [name for names in PANELS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS), "a command without a group has no place in --help"
    out = suite("--help")[1]
    places = [out.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    own = suite("run", "--help")[1]
    assert own.index("--dry-run") < own.index(SELDOM) < own.index("--insecure")
    assert all(f" {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("params", "--backbone", "t5-base", "--method", "lorra"),
            "unknown method 'lorra'; did you mean lora?",
        ),
        (
            ("params", "--backbone", "t5-bas", "--method", "lora"),
            "unknown backbone 't5-bas'; did you mean t5-base",
        ),
        (
            ("params", "--backbone", "t5-base", "--method", "lora", "--set", "rnk=4"),
            "--set: unknown key 'rnk'; did you mean rank?",
        ),
        (
            ("params", "--backbone", "t5-base", "--method", "lora", "--set", "rank"),
            "expected key=value",
        ),
        (
            ("params", "--backbone", "t5-base", "--method", "lora", "--set", "architecture=0"),
            "--set architecture: got 0, expected one key of it, as in --set architecture.KEY=VALUE",
        ),
        (
            ("params", "--backbone", "t5-base", "--method", "peft:lora", "--set", "rr=4"),
            "architecture of peft:lora: unknown key 'rr'; did you mean r?",
        ),
        (
            ("params", "--backbone", "t5-base", "--method", "lora", "--set", "rank=0"),
            "rank: Input should be greater than or equal to 1",
        ),
        (
            ("params", "--backbone", "t5-base", "--method", "lora", "--attention", "mqqa"),
            "unknown attention variant 'mqqa'",
        ),
        (
            ("trial", "--backbone", "minilm", "--method", "lora", "--task", "acceptabilty"),
            "unknown task 'acceptabilty'; did you mean acceptability",
        ),
        (
            (
                *("trial", "--backbone", "minilm", "--method", "lora", "--task", "sst2"),
                *("--home", str(ROOT / "pyproject.toml")),
            ),
            "pyproject.toml: cannot be written to; choose another --home",
        ),
        (("run", "quickstrat"), "unknown sweep 'quickstrat'; did you mean quickstart?"),
        (("run", "my.yaml"), "there is no such file; suite init my.yaml writes one"),
        (
            (
                "run",
                str(ROOT / "sweeps" / "quickstart.yaml"),
                "--dry-run",
                "--set",
                "search.trails=2",
            ),
            "search: unknown key 'trails'; did you mean trials",
        ),
        (("status", "--home", "nowhere"), "--home nowhere: holds no sweep"),
        (("leaderboard", "--home", "nowhere"), "--home nowhere: holds no trials"),
        (("sync", "--home", "nowhere"), "--home nowhere: holds no trials"),
        (("sync", "--home", "nowhere", "--optuna", "foo://bar"), "--optuna foo://bar: expected"),
        (("sync", "--new-id", "--take-over"), "--new-id, --take-over: got both"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_users_mistake_is_one_error_on_stderr_with_exit_code_2(
    suite: Suite, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = suite(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert "Traceback" not in err


def test_a_mistake_of_the_command_line_is_no_line_of_the_file(suite: Suite) -> None:
    for item, said in (
        ("search.trials=many", "search.trials: Input should be a valid integer, got 'many'"),
        ("search.trails=3", "search: unknown key 'trails'; did you mean trials"),
        ("training.Epochs=3", "training: unknown key 'Epochs'; did you mean epoch"),
        ("tasks=[1]", "tasks.0: got 1, expected text"),
        ("search.objective=[score,score]", "search: objective: got ['score', 'score'], expected"),
        ("confirm.seeds=[1,1]", "confirm: seeds are not distinct: [1, 1]"),
    ):
        code, _, err = suite("run", "quickstart", "--dry-run", "--set", item)
        assert code == 2 and err.startswith(f"error: --set: {said}"), err
    asha = "--set", "search.pruner=asha", "--set", "training.epochs=1"
    code, _, err = suite("run", "quickstart", "--dry-run", *asha)
    assert code == 2 and "quickstart.yaml with --set: search.pruner asha ends trials" in err
    for item in ("search..trials=4", ".name=x", "search.=1"):
        code, _, err = suite("run", "quickstart", "--dry-run", "--set", item)
        assert code == 2 and err.startswith(f"error: --set {item!r}: a part of the key is empty")


def test_a_folder_is_no_sweep(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.yaml").mkdir()
    (tmp_path / "all.yaml" / "one.yaml").write_text("")
    code, _, err = suite("run", "all.yaml")
    assert code == 2
    assert "all.yaml is a folder; sweeps may be among its files: all.yaml/one.yaml" in err
    code, _, err = suite("run", "al.yaml")
    assert code == 2 and "did you mean all.yaml" not in err


@pytest.mark.parametrize("variable", ["SUITE_PATH", "SUITE_TASKS"])
def test_a_folder_of_ones_own_that_is_not_there_is_told(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, f"{tmp_path}:{tmp_path / 'nowhere'}")
    code, _, err = suite("list", "sweeps")
    assert code == 2
    assert err.startswith(f"error: {variable}: {tmp_path / 'nowhere'}: no such folder")


def test_plug_ins_of_ones_own_that_cannot_be_used_are_told(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "petl").mkdir()
    text = (ROOT / "suite" / "petl" / "bitfit.py").read_text()
    (tmp_path / "petl" / "mine.py").write_text(text.replace("def attach", "def atach"))
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    code, _, err = suite("params", "--backbone", "bert-base", "--method", "mine")
    assert code == 2 and "is no whole method: it does not define attach (it has atach)" in err
    (tmp_path / "petl" / "mine.py").unlink()
    code, _, err = suite("params", "--backbone", "bert-base", "--method", "dora")
    assert code == 2 and "write peft:dora" in err


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("suite.train.arms.make_arm", broken)
    with pytest.raises(KeyError, match="a bug"):
        main(["params", "--backbone", "t5-base", "--method", "lora"])


def test_an_unknown_option_is_a_usage_error(suite: Suite) -> None:
    code, out, err = suite("list", "methods", "--fromat", "json")
    assert (code, out) == (2, "")
    assert "--fromat" in err


# Tables


ROWS = [{"name": "a|b", "size": 2048, "tags": ["x"]}, {"name": "c", "size": None, "tags": []}]
COLUMNS = [column("name"), column("size", show=render.size, rank=1), column("tags", rank=2)]


def test_the_same_rows_print_as_table_json_csv_and_md(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(fmt: Format) -> str:
        render.render(ROWS, COLUMNS, fmt, keys=["name", "size", "tags"])
        return capsys.readouterr().out

    assert json.loads(printed(Format.JSON)) == ROWS
    assert list(csv.DictReader(io.StringIO(printed(Format.CSV)))) == [
        {"name": "a|b", "size": "2048", "tags": '["x"]'},
        {"name": "c", "size": "", "tags": "[]"},
    ]
    assert printed(Format.MD).splitlines() == [
        "| name | size | tags |",
        "| --- | --: | --- |",
        "| a\\|b | 2.0 KiB | x |",
        "| c | - | - |",
    ]
    render.render([], COLUMNS, Format.MD, title="A: <b>\nB: a|b")
    assert capsys.readouterr().out.startswith("A: &lt;b&gt;\nB: a\\|b\n\n| name |")
    table = printed(Format.TABLE)
    assert "2.0 KiB" in table
    assert "\x1b" not in table, "no colours where there is no terminal"
    assert all(line == line.rstrip() for line in table.splitlines())


def test_csv_without_rows_still_has_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    render.render([], COLUMNS, Format.CSV, keys=["name", "size"])
    assert capsys.readouterr().out == "name,size\n"


@pytest.mark.parametrize("fmt", [Format.TABLE, Format.CSV, Format.MD])
def test_what_others_wrote_commands_neither_a_terminal_nor_a_spreadsheet(
    fmt: Format, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "=A1\x1b]0;owned\x07\x1b[2J\u202e\x9b|<b>"
    render.render([{"name": name, "rate": -1.5}], [column("name"), column("rate")], fmt)
    out = capsys.readouterr().out
    shown = "\\x1b]0;owned\\x07"
    if fmt is Format.MD:
        # Markdown takes a backslash for the beginning of an escape.
        shown = shown.replace("\\", "\\\\")
    assert shown in out
    assert not set(out) & set("\x1b\x07\u202e\x9b")
    if fmt is Format.CSV:
        assert out.splitlines()[1].startswith("'=A1")
        assert out.splitlines()[1].endswith(",-1.5"), "a number keeps its sign"
    if fmt is Format.MD:
        assert "\\|&lt;b&gt;" in out


def test_errors_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--home", "no\x1b[2Jhome"])
    assert "no\\x1b[2Jhome" in capsys.readouterr().err


def test_a_narrow_terminal_loses_the_least_important_columns_first() -> None:
    heads = [[c.head for c in fitting(ROWS, COLUMNS, width)] for width in (80, 16, 8, 1)]
    assert heads == [["name", "size", "tags"], ["name", "size"], ["name"], ["name"]]


@pytest.mark.parametrize(("asked", "width"), [("0", None), ("-1", None), ("7", 7)])
def test_a_width_that_is_none_is_not_taken(
    asked: str, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", asked)
    assert render.terminal_width() == width
    render.say("said in any case")


def test_wide_letters_are_measured_as_a_terminal_shows_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "\u4e2d\u6587\u6570\u636e"
    head = "\u540d\u79f0 \u6570\u636e\u96c6"
    wide = [column("name", head), column("size", rank=1)]
    # Counted by letters, 13 places would be enough for both.
    assert [c.head for c in fitting([{"name": name, "size": 1}], wide, 15)] == [head]
    monkeypatch.setenv("COLUMNS", "17")
    render.render([{"name": name, "size": 1}], wide, Format.TABLE)
    out = capsys.readouterr().out
    assert name in out and "size" in out
    assert all(word in out for word in head.split())


@pytest.mark.parametrize(
    ("show", "value", "said"),
    [
        (render.size, 0, "0 B"),
        (render.size, 1536, "1.5 KiB"),
        (render.size, 5 * 1024**4, "5.0 TiB"),
        (render.duration, 59.94, "59.9 s"),
        (render.duration, 200, "3 min 20 s"),
        (render.duration, 7500, "2 h 05 min"),
        (values.energy, 0.00012, "120 mWh"),
        (values.energy, 0.0009997, "1,000 mWh"),
        (values.energy, 2.5, "2.50 kWh"),
        (render.brief, 3.1e-6, "3.1e-06"),
        (render.count, 1972224, "1,972,224"),
        (render.score, None, "-"),
        (values.text, ["a", "b"], "a, b"),
    ],
)
def test_values_are_written_for_reading(
    show: Callable[[Any], str], value: object, said: str
) -> None:
    assert show(value) == said


def interval(over: str) -> dict[str, Any]:
    return {"ci_low": 79.94, "ci_high": 82.4, "ci_of": over}


@pytest.mark.parametrize(
    ("show", "fields", "said"),
    [
        (values.mean_score, {"score_mean": None}, "-"),
        (values.mean_score, {"score_mean": 83.14}, "83.1"),
        (values.mean_score, {"score_mean": 83.14, "score_std": 0.4}, "83.1 ± 0.4"),
        (values.mean_score, {"score_mean": 12.3, "higher_is_better": False}, "12.3 ↓"),
        (
            values.mean_score,
            {"score_mean": 3.412, "score_std": 0.034, "higher_is_better": False},
            "3.41 ± 0.03 ↓",
        ),
        (
            values.interval,
            interval("seeds x items") | {"score_mean": 9.95, "higher_is_better": False},
            "79.94 to 82.40",
        ),
        (values.interval, {}, "-"),
        (values.interval, interval("seeds x items"), "79.9 to 82.4"),
        (values.interval, interval("items"), "79.9 to 82.4 (over items only)"),
        (partial(values.interval, short=True), interval("items"), "79.9 to 82.4 *"),
        (values.rank, {"rank": "2-4"}, "2-4"),
        (values.rank, {"rank": None}, "-"),
        (values.rank, {"rank_missing": NO_RANK}, "none: one seed"),
        (partial(values.rank, short=True), {"rank_missing": NO_RANK}, "one seed"),
        (values.status, {"admitted": None}, "done"),
        (values.status, {"admitted": False}, "rejected"),
        (values.status, {"dirty": True}, "done (dirty)"),
        (values.status, {"unverified": NOT_VERIFIABLE}, "done, not verifiable here"),
    ],
)
def test_cells_of_the_leaderboard_are_written_for_reading(
    show: Callable[[Any], str], fields: dict[str, Any], said: str
) -> None:
    row = Row(status="done", **fields)
    assert show(vars(row)) == said


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("methods", "lora"),
        ("tasks", "acceptability"),
        ("backbones", "t5-base"),
        ("search-spaces", "read"),
        ("attention", "pretrained"),
        ("sweeps", "quickstart"),
    ],
)
def test_list_says_what_there_is(suite: Suite, kind: str, known: str) -> None:
    code, out, _ = suite("list", kind, "--format", "json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert set(rows[known]) - {"start"} == {"name", "description", "source", "families"}
    assert all(row["description"] and row["source"] for row in rows.values())
    assert known in suite("list", kind)[1]


# Parameters


def test_params_counts_lora_by_its_formula(suite: Suite) -> None:
    code, out, _ = suite(
        "params", "--backbone", "t5-base", "--method", "lora", "--set", "rank=8", "--format", "json"
    )
    counted = json.loads(out)
    # q and v of the encoder's, the decoder's and the cross attention of 12 layers
    projections = 3 * 12 * 2
    width = 768
    rank = 8
    assert code == 0
    assert counted["trainable"] == counted["method_trainable"] == projections * rank * 2 * width
    assert counted["total"] == 222_903_552 + counted["trainable"]
    assert counted["architecture"]["rank"] == 8


def test_params_counts_the_tasks_head_apart(suite: Suite) -> None:
    counted = json.loads(
        suite(
            "params",
            "--backbone",
            "bert-base",
            "--method",
            "lora",
            "--num-labels",
            "5",
            "--format",
            "json",
        )[1]
    )
    assert counted["head_trainable"] == 5 * 768 + 5
    assert counted["trainable"] == counted["method_trainable"] + counted["head_trainable"]
    assert counted["trainable_percent"] == pytest.approx(
        100 * counted["trainable"] / counted["total"]
    )


def test_column_of_a_callable_is_aligned_as_told() -> None:
    assert Column("n", str, right=True).right
    assert not column("name").right
    assert column("n", show=render.count).right
