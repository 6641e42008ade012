"""Commands that show stored numbers and names import nothing heavy, and what stands in for the imports says the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from suite.attention import variants
from suite.backbones import families
from suite.cli.listing import ABOUT, ATTENTION, FAMILY
from suite.cli.plug_ins import described
from suite.config.space import peft_spaces
from suite.config.sweep import StopRule
from suite.errors import TrackingError
from suite.leaderboard.collect import sweep_rows
from suite.leaderboard.table import choose, leaderboard_of, plain, to_rows
from suite.petl import methods
from suite.plan.definition import read_plan, store_definition
from suite.record.folder import Home
from suite.tracking import open_store
from suite.tracking.kept_runs import recall
from suite.tracking.query import chosen
from suite.tracking.rows import KIND, TAG
from tests.commands import ROOT, Suite, shell, suite
from tests.records import write_cell, write_definition

__all__ = ["suite"]
HEAVY = (
    "torch",
    "transformers",
    "sklearn",
    "scipy",
    "pandas",
    "optuna",
    "mlflow",
    "sqlalchemy",
    "ray",
    "deepspeed",
    "datasets",
)
NOT_TO_BUILD = (
    "sklearn",
    "scipy.stats",
    "pandas",
    "datasets",
    "optuna",
    "deepspeed",
    "ray",
    "mlflow",
)
PROBE = """
import json, sys
from suite.cli.app import main

heavy, found = sys.argv[1].split(","), {}
for line in sys.argv[2:]:
    try:
        main(json.loads(line))
    except SystemExit as ended:
        assert not ended.code, line
    # What one command has imported is there for the next: the first one to blame is named.
    found[line] = [name for name in heavy if name in sys.modules]
print("\\n" + json.dumps(found))
"""


def imported(commands: list[list[str]], heavy: tuple[str, ...] = HEAVY) -> dict[str, list[str]]:
    return run(commands, heavy)[0]


def run(
    commands: list[list[str]], heavy: tuple[str, ...] = HEAVY
) -> tuple[dict[str, list[str]], str]:
    """By command, which heavy libraries are there after it; and what all of them printed."""
    lines = [json.dumps(command) for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, ",".join(heavy), *lines],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed, _, last = done.stdout.removesuffix("\n").rpartition("\n")
    found: dict[str, list[str]] = json.loads(last)
    blamed = {line: names for line, names in found.items() if names}
    return blamed, printed


def test_lists_the_status_and_the_leaderboard_import_nothing_heavy(finished: Home) -> None:
    kinds = ("methods", "attention", "tasks", "backbones", "search-spaces", "sweeps")
    commands = [["list", kind] for kind in kinds]
    for name in ("status", "leaderboard"):
        commands.append([name, "--home", str(finished.path)])
    # The first reader of a store asks MLflow; those after it find the store as it was.
    chosen(finished.tracking_uri)
    assert imported(commands) == {}


def test_a_dry_run_checks_once_and_then_reads_what_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["run", "quickstart", "--dry-run", "--home", str(tmp_path / "home")]
    # The first one builds every arm, with torch, transformers and peft, and with nothing else.
    assert imported([command], NOT_TO_BUILD) == {}
    # What several seeds can show is a quantile, which scipy knows.
    found, printed = run([command], tuple(name for name in HEAVY if name != "scipy"))
    assert "cells      7" in printed
    assert found == {}
    assert not (tmp_path / "home").exists()


def test_the_status_asks_the_stop_rule_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    write_definition(home, ["lora"], ["agreement"], trials=8)
    plan = read_plan(home, "demo")
    rule = plan.config.search.model_copy(update={"stop": StopRule(tolerance=50.0)})
    store_definition(replace(plan, config=plan.config.model_copy(update={"search": rule})), home)
    write_cell(home, trials=6, seeds=())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["status", "--home", str(home.path), "--format", "json"]
    first = shell(*command, cwd=tmp_path).stdout
    assert json.loads(first)[0]["saved_trials"] == 2
    found, again = run([command])
    assert (found, again) == ({}, first)


TINY = """
name: tiny
backbones: [{name: bert-base, config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, vocab_size: 384}}]
methods: [full]
tasks: [acceptability]
"""


def test_a_kept_plan_is_one_of_the_same_sweep_code_and_files(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sweep = tmp_path / "tiny.yaml"
    sweep.write_text(TINY)

    def kept(*changes: str) -> tuple[int, dict[str, Any]]:
        """Plans that are kept after a dry run, and what it said."""
        options = [text for change in changes for text in ("--set", change)]
        code, out, err = suite(
            "run", sweep, "--dry-run", "--home", tmp_path / "h", "--format", "json", *options
        )
        assert code == 0, err
        told = json.loads(out)
        # It depends on the memory that is free at the moment, which no plan holds.
        del told["cost"]["partitioning"]
        return len(list((tmp_path / "petl-suite" / "plans").glob("*.json"))), told

    first = kept()
    assert first[0] == 1
    assert kept() == first
    (file,) = (tmp_path / "petl-suite" / "plans").glob("*.json")
    whole = file.read_text()
    file.write_text(whole[:-20])
    assert kept() == first and file.read_text() == whole, "a damaged file is written anew"
    more, told = kept("search.trials=5")
    assert more == 1, "no check looks at the budget"
    assert told["cost"]["search_trials"] == 5 != first[1]["cost"]["search_trials"]
    assert kept("training.max_length=64")[0] == 2
    assert kept("training.batch_size=[16, 96]")[0] == 3
    assert kept("training.batch_size=[32, 96]")[0] == 4, "each batch size is checked"
    spaces = tmp_path / "own" / "search_spaces"
    spaces.mkdir(parents=True)
    shutil.copy(ROOT / "search_spaces" / "full.yaml", spaces)
    monkeypatch.setenv("SUITE_PATH", str(tmp_path / "own"))
    assert kept()[0] == 5, "the same ranges in a file of the user's own are another file"
    (tmp_path / "own" / "petl").mkdir()
    assert kept() == (5, first[1]), (
        "with code of the user's own nothing is kept, and all is checked"
    )
    code, _, err = suite(
        "run", sweep, "--dry-run", "--set", "training.max_length=4000", "--home", tmp_path / "h"
    )
    assert code == 2 and "4000" in err


@pytest.mark.parametrize(
    ("axis", "base", "registry", "keys"),
    [
        ("petl", "Method", methods, ABOUT),
        ("attention", "Variant", variants, ATTENTION),
        ("backbones", "Family", families, FAMILY),
    ],
)
def test_the_source_of_every_plug_in_says_what_its_class_says(
    axis: str, base: str, registry: Any, keys: tuple[str, ...]
) -> None:
    found = described(axis, base, keys)
    assert found is not None and sorted(found) == registry.names()
    for name, about in found.items():
        of_class = {key: getattr(registry.get(name), key) for key in keys}
        assert about == of_class


PLUG_IN = """
import {library}
from torch import nn
from suite.petl.{module} import {base} as Parent

class Helper(nn.Module):
    description = "a module"

class Mine(Parent):
    description = {description}
    {more}
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"library": "nowhere"}, {"mine": ("as it stands", "ours")}),
        ({"more": "name = 'other'"}, {"other": ("as it stands", "ours")}),
        ({"base": "Method", "module": "base"}, None),  # abstract: no method has no `attach`
        ({"description": "'computed'.upper()"}, None),
        ({"library": "math; print(1)"}, None),
        ({"base": "methods", "module": "__init__"}, None),
        ({"more": "if 1 < 2: source = 'b'"}, None),
        ({"more": "$"}, None),
    ],
)
def test_a_users_file_is_read_as_far_as_it_is_plain(
    given: dict[str, str],
    expected: dict[str, tuple[str, str]] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {
        "library": "math",
        "module": "full",
        "base": "Full",
        "description": "'as it stands'",
        "more": "source = 'ours'",
    } | given
    if "source" not in values["more"]:
        values["more"] = f"source = 'ours'\n    {values['more']}"
    (tmp_path / "petl").mkdir()
    (tmp_path / "petl" / "mine.py").write_text(PLUG_IN.format(**values))
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    found = described("petl", "Method", ABOUT)
    if expected is None:
        assert found is None
        return
    assert found is not None
    own = {
        name: (about["description"], about["source"])
        for name, about in found.items()
        if name not in methods_shipped()
    }
    assert own == expected


def methods_shipped() -> set[str]:
    return {path.stem for path in (ROOT / "suite" / "petl").glob("[a-z]*.py")}


def test_a_list_asks_the_class_where_the_source_does_not_tell(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "petl").mkdir()
    values = {
        "library": "math",
        "module": "full",
        "base": "Full",
        "description": "'computed'.upper()",
        "more": "source = 'ours'",
    }
    (tmp_path / "petl" / "mine.py").write_text(PLUG_IN.format(**values))
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    rows = json.loads(suite("list", "methods", "--format", "json")[1])
    assert [row["description"] for row in rows if row["name"] == "mine"] == ["COMPUTED"]
    assert len(rows) == len(methods.names()) + len(peft_spaces())


def test_kept_runs_are_forgotten_when_the_store_changes(finished: Home, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "copy")
    home = Home(tmp_path / "copy")
    database = home.path / "mlflow.db"
    expected = plain(chosen(home.tracking_uri).rows)
    assert recall(database), "kept by the first reader"
    assert plain(chosen(home.tracking_uri).rows) == expected
    assert plain(chosen(home.tracking_uri, sweep="demo").rows) == expected
    writer = open_store(home.tracking_uri)
    run = writer.runs([writer.experiments()["demo"]], {"suite.kind": KIND}, having=TAG)[0]
    writer.delete_run(run.id)
    assert not recall(database)
    with pytest.raises(TrackingError, match="no results yet"):
        chosen(home.tracking_uri)


def test_plain_rows_are_those_of_the_frame(finished: Home) -> None:
    rows = sweep_rows(finished, "demo")
    assert len(rows) == 4
    shown = plain(choose(rows).rows)
    expected = to_rows(leaderboard_of(rows))
    assert json.dumps(shown) == json.dumps(expected), "in the same order of rows and keys"
