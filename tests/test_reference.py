"""Printed numbers beside ours: which row they belong to, what is refused, and that the shipped sweeps carry them rightly."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from pydantic import ValidationError

from suite.cli.leaderboard import show
from suite.cli.options import Format
from suite.cli.paper import with_paper
from suite.config.arm import Arm
from suite.config.reference import MEAN, Reference
from suite.config.sweep import AttentionChoice, BackboneChoice, SweepConfig
from suite.config.sweep_files import load_sweep
from suite.errors import ConfigError
from suite.evaluation.subjects import UNTRAINED
from suite.plan.definition import check_definition, store_definition
from suite.plan.plan import Plan, PlannedCell, _arms, make_plan
from suite.record.folder import Home
from suite.record.references import check_references, evaluated, printed
from suite.tracking import leaderboard, sync, to_rows
from tests.records import make_home, make_spec, make_task
from tests.sweeps import toy_roots, toy_sweep

__all__ = ["toy_roots"]

ROOT = Path(__file__).parents[1]
CARRYING = sorted(path for path in (ROOT / "sweeps").glob("*.yaml") if load_sweep(path).reference)
READ_TASKS = {"cola", "mnli", "qnli", "mrpc", "qqp", "sst2", "stsb"}


def make_arm(
    method: str = "lora",
    attention: str = "pretrained",
    backbone: str = "t5-base",
    **architecture: Any,
) -> Arm:
    return Arm(
        backbone=BackboneChoice(name=backbone),
        attention=AttentionChoice(
            name=attention, options={"kv_heads": 6} if attention == "gqa" else {}
        ),
        method=method,
        architecture={"rank": 8, "alpha": 8.0, **architecture},
    )


def line(**changes: Any) -> Reference:
    return Reference.model_validate(
        {"scores": {"cola": 50.0, "sst2": 90.0, "mean": 70.0}, "source": "a paper", **changes}
    )


# ---- which row ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "arm", "belongs"),
    [
        ({}, make_arm(), True),
        ({"method": "lora"}, make_arm(), True),
        ({"method": "lora"}, make_arm("full"), False),
        ({"backbone": "t5-large"}, make_arm(), False),
        ({"architecture": {"rank": 8}}, make_arm(), True),
        ({"architecture": {"rank": 16}}, make_arm(), False),
        ({"architecture": {"width": None}}, make_arm(), False),
        ({"attention": "gqa"}, make_arm(attention="gqa"), True),
        (
            {"attention": {"name": "gqa", "options": {"kv_heads": 6}}},
            make_arm(attention="gqa"),
            True,
        ),
        ({"attention": {"name": "gqa", "options": {}}}, make_arm(attention="gqa"), False),
        ({"attention": "wgqa"}, make_arm(attention="gqa"), False),
    ],
)
def test_a_line_belongs_to_the_arms_that_have_all_it_says(
    given: dict[str, Any], arm: Arm, belongs: bool
) -> None:
    assert bool(printed([line(**given)], arm, "cola", {"cola", "sst2"})) is belongs


def test_a_mean_is_compared_over_the_same_tasks_only() -> None:
    arm = make_arm()
    lines = [line()]
    assert printed(lines, arm, MEAN, {"cola", "sst2"})["score"] == 70.0
    assert (
        printed(lines, arm, MEAN, {"cola"})
        == printed(lines, arm, MEAN, {"cola", "sst2", "rte"})
        == {}
    )
    alone = [line(scores={"mean": 70.0}, mean_of=["cola", "sst2"])]
    assert printed(alone, arm, MEAN, {"sst2", "cola"})["score"] == 70.0
    assert printed(alone, arm, MEAN, {"cola"}) == {}


def test_evaluations_are_kept_apart_from_the_sweeps_own_tasks() -> None:
    lines = [
        line(evaluation="untrained", scores={"mmlu/acc": 0.41}, stds={"mmlu/acc": 0.004}),
        line(evaluation="trained", scores={"mmlu/acc": 0.37}),
    ]
    assert printed(lines, make_arm(), "mmlu/acc", {"mmlu/acc"}) == {}
    names: dict[str, Any] = {
        "backbone": "b",
        "attention": "mha",
        "options": {},
        "method": "full",
        "architecture": {},
    }
    before = evaluated(lines, trained=False, **names)
    assert before == {
        "mmlu/acc": {
            "score": 0.41,
            "std": 0.004,
            "source": "a paper",
            "comparable": True,
            "printed": {},
        }
    }
    assert evaluated(lines, trained=True, **names)["mmlu/acc"]["score"] == 0.37


def test_an_evaluation_stands_beside_the_papers(tmp_path: Path) -> None:
    home = Home(tmp_path)
    lines = [
        {
            "attention": "gqa",
            "evaluation": "untrained",
            "scores": {"mmlu/acc": 0.41, "gsm8k:5/exact_match": 0.1},
            "source": "SA, table 1",
        }
    ]
    config = toy_sweep(reference=lines)
    store_definition(Plan(config, (), 1), home)
    names = {
        "sweep": None,
        "backbone": "b",
        "attention": "gqa",
        "attention_options": {"kv_heads": 2},
        "architecture": {},
        "lm_eval_task": "mmlu",
    }
    rows = [
        {**names, "method": method, "metric": metric, "value": 0.5}
        for method in (UNTRAINED, "full")
        for metric in ("acc", "f1")
    ]
    found = [
        (row["reference_score"], row["difference"], row["reference_source"])
        for row in with_paper(rows, home, "toy")
    ]
    assert found == [
        (0.41, pytest.approx(0.09, abs=1e-12), "SA, table 1"),
        *[(None, None, None)] * 3,
    ]
    assert {row["reference_score"] for row in with_paper(rows, home, None)} == {None}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scores": {}}, "scores is empty"),
        ({"stds": {"rte": 1.0}}, "rte"),
        ({"score": 1.0}, "score"),
        ({"source": None}, "source"),
    ],
)
def test_lines_that_say_nothing_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        line(**changes)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            [line(), line(method="bitfit")],
            r"reference\[1\] bitfit \(a paper\): no arm of this sweep is like that.*--set reference=\[\]",
        ),
        ([line(scores={"colaa": 1.0, "cola": 2.0})], r"reference\[0\].*unknown task 'colaa'"),
        ([line(scores={"rte": 1.0})], r"none of its tasks is one of the sweep's, cola, sst2"),
        (
            [line(method="lora"), line(architecture={"rank": 8})],
            r"reference\[0\] lora.*reference\[1\] any arm.*both have a score for .* on cola",
        ),
    ],
)
def test_a_line_without_a_cell_and_a_cell_with_two_lines_are_refused(
    lines: list[Reference], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_references(lines, [make_arm()], ["cola", "sst2"], where="some.yaml")


def test_a_sweep_may_be_run_on_some_of_its_tasks() -> None:
    check_references([line()], [make_arm()], ["cola"], where="some.yaml")


def test_the_plan_refuses_a_reference_that_is_about_nothing(toy_roots: Path) -> None:
    about = {"scores": {"toy": 90.0}, "source": "a paper", "method": "lora"}
    assert len(make_plan(toy_sweep(reference=[about]), where="toy.yaml").cells) == 2
    with pytest.raises(ConfigError, match=r"toy\.yaml: reference\[0\] read \(a paper\)"):
        make_plan(toy_sweep(reference=[{**about, "method": "read"}]), where="toy.yaml")


def test_references_may_be_added_to_a_sweep_that_has_begun(toy_roots: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    store_definition(make_plan(toy_sweep(), where="toy.yaml"), home)
    check_definition(
        make_plan(toy_sweep(reference=[{"scores": {"toy": 1.0}, "source": "s"}]), where="toy.yaml"),
        home,
    )


# ---- the leaderboard -----------------------------------------------------------------------------------------------------------


def refer(home: Home, *lines: Reference) -> None:
    """The finished sweep of `make_home`, run again with references."""
    old = SweepConfig.model_validate_json(home.sweep_definition("demo").read_bytes())
    cells = [
        PlannedCell(make_spec(m, t).arm, make_task(t), _range())
        for m in ("full", "lora")
        for t in ("agreement", "entailment")
    ]
    store_definition(
        Plan(old.model_copy(update={"reference": list(lines)}), tuple(cells), world_size=2), home
    )


def _range() -> Any:
    from suite.config.space import LearningRateRange
    from tests.records import RANGE

    return LearningRateRange(low=RANGE[0], high=RANGE[1])


def test_the_leaderboard_shows_the_paper_beside_ours(
    tmp_path: Path, empty_db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path)
    shutil.copy(empty_db, tmp_path)
    sync(home, tracking_uri=home.tracking_uri)
    assert {row["reference_score"] for row in to_rows(leaderboard(home.tracking_uri))} == {None}
    show(home.tracking_uri, fmt=Format.MD)
    assert "paper" not in capsys.readouterr().out
    scores = {"agreement": 0.5, "entailment": 0.25, "mean": 0.375}
    lora = Reference(
        method="lora",
        scores=scores,
        stds={"agreement": 0.1},
        printed={"energy_kwh": 2.06},
        source="READ, table 1",
    )
    refer(home, lora)
    sync(
        home, tracking_uri=home.tracking_uri
    )  # the trials are as they were: only the definition is another
    rows = {(row["method"], row["task"]): row for row in to_rows(leaderboard(home.tracking_uri))}
    agreement = rows["lora", "agreement"]
    assert (
        agreement["reference_score"],
        agreement["reference_std"],
        agreement["reference_source"],
    ) == (0.5, 0.1, "READ, table 1")
    assert agreement["reference"] == {"energy_kwh": 2.06}
    assert agreement["difference"] == pytest.approx(agreement["score_mean"] - 0.5, abs=1e-12)
    assert (
        rows["lora", "mean"]["reference_score"] == 0.375
        and rows["lora", "mean"]["reference_std"] is None
    )
    assert {rows["full", task]["difference"] for task in ("agreement", "entailment", "mean")} == {
        None
    }
    show(home.tracking_uri, fmt=Format.MD)
    shown = capsys.readouterr().out
    assert "| paper | ours - paper |" in shown and f"| {agreement['difference']:+.1f} |" in shown

    refer(home, lora.model_copy(update={"unlike": "another corpus"}))
    sync(home, tracking_uri=home.tracking_uri)
    rows = {(row["method"], row["task"]): row for row in to_rows(leaderboard(home.tracking_uri))}
    unlike = rows["lora", "agreement"]
    assert unlike["reference_source"] == "READ, table 1; another corpus"
    assert unlike["reference_score"] == 0.5 and unlike["difference"] is None
    assert rows["lora", "mean"]["difference"] is None


# ---- the shipped sweeps --------------------------------------------------------------------------------------------------------


def arms_of(config: SweepConfig) -> list[Arm]:
    """Of its plan, without building them: that takes seconds for each."""
    return [found[0] for found in _arms(config, {}, where="test")]


@pytest.mark.parametrize("path", CARRYING, ids=lambda path: path.stem)
def test_every_line_of_a_shipped_sweep_is_about_an_arm_and_says_its_table(path: Path) -> None:
    config = load_sweep(path)
    arms = arms_of(config)
    check_references(config.reference, arms, config.tasks, where=path.name)
    assert all("table" in entry.source for entry in config.reference)
    head = path.read_text().split("name:")[0]
    assert (
        "arXiv" in head
        and "table" in head
        and ("differs" in head or config.name == "shared-attention-llama")
    )


@pytest.mark.parametrize("path", CARRYING, ids=lambda path: path.stem)
def test_a_printed_mean_is_the_mean_of_the_printed_columns(path: Path) -> None:
    """So that it may be compared with ours; to a tenth, as the papers round each column."""
    for entry in load_sweep(path).reference:
        columns = [score for task, score in entry.scores.items() if task != MEAN]
        if columns and MEAN in entry.scores:
            assert entry.scores[MEAN] == pytest.approx(fmean(columns), abs=0.1), str(entry)


def test_the_paper_sweeps_are_those_of_the_papers_tables() -> None:
    assert {path.stem for path in CARRYING} >= {
        *("read-glue-t5-base", "read-glue-t5-large", "read-recurrence"),
        *("mhe-encoder", "mhe-decoder", "mhe-translation", "mhe-superglue", "mhe-squad"),
        *("wgqa-t5", "wgqa-t5-multi-news", "wgqa-t5-wmt14", "shared-attention-llama"),
    }
    read = load_sweep(ROOT / "sweeps" / "read-glue-t5-base.yaml")
    assert {*read.tasks} == READ_TASKS and len(read.reference) == len(read.methods) == 7
    assert (
        read.training.epochs,
        read.training.batch_size,
        read.search.trials,
        read.search.stop,
    ) == (30, 96, 32, None)
    assert (read.architectures, len(read.confirm.seeds), read.search.edge_guard.extensions) == (
        "search",
        3,
        0,
    )
    assert all(
        found[1].low == 1e-6 and found[1].high == 3e-3 for found in _arms(read, {}, where="test")
    )


def test_every_arm_of_the_recurrence_sweep_has_its_own_line_of_table_2() -> None:
    config = load_sweep(ROOT / "sweeps" / "read-recurrence.yaml")
    found = {
        (arm.backbone.drop_layers, arm.architecture["recurrent"]): printed(
            config.reference, arm, "cola", {*config.tasks}
        )["score"]
        for arm in arms_of(config)
    }
    assert found == {(0, True): 52.59, (0, False): 53.24, (4, True): 54.05, (4, False): 50.17}
