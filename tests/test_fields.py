"""One table of fields: what is made from it, and that a measured number takes two edits."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from suite.leaderboard.fields import BY_NAME, COLUMNS, FIELDS, Average, Kind, Row, metrics_of
from suite.report.tables import LEADERBOARD

ROOT = Path(__file__).parents[1]
UNITS = {"kwh": "kWh", "s": "s", "bytes": "bytes", "parameters": "count", "decades": "log10"}
TYPES = {
    Kind.TEXT: ("str",),
    Kind.INTEGER: ("int",),
    Kind.NUMBER: ("float",),
    Kind.FLAG: ("bool",),
    Kind.JSON: ("dict", "list"),
}


def test_every_field_says_what_it_is_in_its_own_unit() -> None:
    types = {f.name: str(f.type) for f in fields(Row)}
    for about in FIELDS:
        assert about.meaning and not about.meaning.endswith(".")
        assert types[about.name].startswith(TYPES[about.kind])
        for ending, unit in UNITS.items():
            if about.name.endswith(f"_{ending}") and about.kind is not Kind.TEXT:
                assert about.unit == (unit if about.name != "samples_per_s" else "1/s")
        if about.average in (Average.MEAN, Average.SCORE):
            assert about.kind in (Kind.INTEGER, Kind.NUMBER)
        if about.metric:
            assert about.kind in (Kind.INTEGER, Kind.NUMBER)
    assert set(LEADERBOARD) - {"label"} <= set(COLUMNS)


def test_the_metrics_are_the_numbers_that_are_known() -> None:
    row = Row(score_mean=0.5, seeds=3, energy_kwh=None, difference=1.0, train_s=float("inf"))
    assert metrics_of(row) == {"score_mean": 0.5, "seeds": 3.0, "search_trials": 0.0}
    measured = {"tool": {"accuracy": {"mean": 0.25, "std": None, "stderr": 0.5, "seeds": 1}}}
    found = metrics_of(Row(lm_eval=measured))
    assert (found["lm_eval.tool.accuracy"], found["lm_eval.tool.accuracy_stderr"]) == (0.25, 0.5)


def test_the_list_in_the_documentation_is_that_of_the_table() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from leaderboard_columns import DOCUMENT, with_table
    finally:
        sys.path.remove(str(ROOT / "tools"))
    text = DOCUMENT.read_text()
    assert text == with_table(text), "run: python tools/leaderboard_columns.py"
    assert text.count("| `score_mean` |") == 1 and BY_NAME["score_mean"].meaning in text


SCRIPT = """
from pathlib import Path
from suite.leaderboard.collect import sweep_rows
from suite.leaderboard.fields import metrics_of
from suite.leaderboard.file import read_rows, write_rows
from suite.leaderboard.table import leaderboard_of, to_rows
from suite.tracking import open_store, sync
from suite.report.tables import LEADERBOARD
from tests.records import make_home

home = make_home(Path("home"), methods=["lora"], trials=1, seeds=[1, 2])
for number, folder in enumerate(home.trials()):
    folder.write_result(folder.result().model_copy(update={"gradient_norm": 2.0 + number % 2}))
write_rows(Path("rows"), sweep_rows(home, "demo"))
rows = read_rows(Path("rows"))
frame = leaderboard_of(rows)
assert frame["gradient_norm"].dtype == "float64" and frame.columns[-1] == "gradient_norm"
*cells, mean = to_rows(frame)
assert all(2.0 <= cell["gradient_norm"] <= 3.0 for cell in cells)
assert mean["task"] == "mean"
assert mean["gradient_norm"] == sum(cell["gradient_norm"] for cell in cells) / 2
assert metrics_of(rows[0])["gradient_norm"] == rows[0].gradient_norm
uri = f"sqlite:///{Path('mlflow.db').resolve()}"
sync(home, tracking_uri=uri)
store = open_store(uri)
stored = {"cell": set(), "trial": set()}
for kind, values in stored.items():
    for run in store.runs([store.experiments()["demo"]], {"suite.kind": kind}):
        values.add(store.client.get_run(run.id).data.metrics["gradient_norm"])
assert stored["trial"] == {2.0, 3.0}
assert stored["cell"] == {row.gradient_norm for row in rows}
assert LEADERBOARD["gradient_norm"].startswith("norm of the last gradient")
"""


def test_a_measured_number_is_two_edits(tmp_path: Path, empty_db: Path) -> None:
    """docs/adding.md, taken literally, in a copy of the package; the store is a real one."""
    shutil.copy(empty_db, tmp_path / "mlflow.db")
    section = (ROOT / "docs" / "adding.md").read_text().partition("## A measured number")[2]
    in_record, in_row = re.findall(r"```py\n(.*?)```", section, re.DOTALL)[:2]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "suite", tmp_path / "suite", ignore=ignored)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignored)
    for path, before, line in (
        ("suite/record/result.py", "    started_at: float\n", in_record),
        ("suite/leaderboard/fields.py", "    # What follows is kept with the row", in_row),
    ):
        text = (tmp_path / path).read_text()
        assert text.count(before) == 1
        (tmp_path / path).write_text(text.replace(before, line + before))
    command = [sys.executable, "-P", "-c", SCRIPT]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
