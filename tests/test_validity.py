"""Which rows are admitted: what a run says against itself, what its runs disagree on, and what the leaderboard does with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from suite.backbones.loading import Head
from suite.cli.leaderboard import columns, show
from suite.cli.options import Format
from suite.errors import TrackingError
from suite.leaderboard.fields import Row
from suite.leaderboard.validity import judge, judge_mean
from suite.record.cells import Trial, read_cells
from suite.record.folder import Home
from suite.record.spec import Phase
from suite.tracking import leaderboard, sync, to_rows
from suite.train.build import build_model
from suite.train.probe import digest_of, strays
from suite.train.running_trial import TrialProgress
from suite.train.validity import compared_losses
from tests.records import (
    GOOD,
    RATES,
    cell_rows,
    make_result,
    make_spec,
    write_definition,
    write_trial,
)
from tests.toy import resolved_tiny
from tests.trained import trained_spec

NOW = {"torch": "2.13.0", "transformers": "5.23.0", "ray": "2.60.0"}


def trials(**changes: Any) -> tuple[list[Trial], list[Trial]]:
    """Confirm runs with seeds 1 to 3, of which `changes` hold for the second, and one search trial."""
    specs = [make_spec(seed=seed, learning_rate=RATES[2]) for seed in (1, 2, 3)] + [
        make_spec(number=0)
    ]
    common = {
        "validity": GOOD,
        "data_hash": "d",
        "precision": "fp32",
        "provenance": {"versions": NOW, "git": {"dirty": False}},
    }
    results = [
        make_result(spec, **(common | (changes if spec.seed == 2 else {}))) for spec in specs
    ]
    *confirmed, search = [
        Trial(Home(Path("x")).trial(s), s, r) for s, r in zip(specs, results, strict=True)
    ]
    return confirmed, [search]


def test_a_row_whose_runs_pass_and_agree_is_admitted() -> None:
    assert judge(*trials()) == {"admitted": True, "rejected": [], "dirty": False}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"validity": GOOD.model_copy(update={"output_changed": False})},
            "seed 2: training did not change the output",
        ),
        ({"validity": GOOD.model_copy(update={"no_nan": False})}, "seed 2: the output holds NaN"),
        (
            {
                "validity": GOOD.model_copy(
                    update={"trainable_as_intended": False, "strays": ["bert.x"]}
                )
            },
            "seed 2: other parameters trained than intended (bert.x)",
        ),
        ({"data_hash": "other"}, "its runs read different data"),
        (
            {"splits": {"train": 99, "validation": 20, "test": 20}},
            "its runs have splits of different sizes",
        ),
        (
            {"provenance": {"versions": NOW | {"torch": "2.12.0"}}},
            "its runs used different versions of torch (2.12.0, 2.13.0)",
        ),
        ({"precision": "bf16"}, "its runs computed in different precisions (bf16, fp32)"),
    ],
)
def test_one_run_is_enough_to_reject_a_row(changes: dict[str, Any], reason: str) -> None:
    assert judge(*trials(**changes)) == {"admitted": False, "rejected": [reason], "dirty": False}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"backbone": {"commit": "a"}}, {"backbone": {"commit": "b"}}),
        ({"backbone": {"sha256": "a"}}, {"backbone": {"sha256": "b"}}),
        ({"backbone": {"own_code": "a"}}, {"backbone": {"own_code": "b"}}),
        ({"tokenizer_sha256": "a"}, {"tokenizer_sha256": "b"}),
    ],
)
def test_runs_from_different_weights_are_no_row(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    def judged(*said: dict[str, Any]) -> dict[str, Any]:
        runs, search = trials()
        told = []
        for run, provenance in zip(runs, said, strict=True):
            assert run.result is not None
            result = run.result.model_copy(update={"provenance": provenance})
            told.append(Trial(run.folder, run.spec, result))
        return judge(told, search)

    assert judged(first, {}, first)["admitted"] is True, "a run need not say it"
    assert judged(first, first, second)["rejected"] == [
        "its runs used different backbone weights, code or tokenizers"
    ]


@pytest.mark.parametrize("fell", [False, None])
def test_a_loss_that_did_not_fall_and_another_ray_are_no_reason(fell: bool | None) -> None:
    changes = {
        "validity": GOOD.model_copy(update={"loss_fell": fell}),
        "provenance": {"versions": NOW | {"ray": "2.61.0"}},
    }
    assert judge(*trials(**changes)) == {"admitted": True, "rejected": [], "dirty": False}


def test_a_run_from_before_there_were_checks_leaves_it_open() -> None:
    assert judge(*trials(validity=None)) == {"admitted": None, "rejected": [], "dirty": False}
    assert judge(*trials(validity=None, data_hash="other"))["admitted"] is False


def test_without_a_confirmed_run_nothing_is_known() -> None:
    _, search = trials()
    assert judge([], search)["admitted"] is None


def test_a_search_trial_counts_for_data_and_versions_only() -> None:
    confirmed, (search,) = trials()
    assert search.result is not None
    hopeless = search.result.model_copy(
        update={"validity": GOOD.model_copy(update={"output_changed": False})}
    )
    assert judge(confirmed, [Trial(search.folder, search.spec, hopeless)])["admitted"] is True
    other = search.result.model_copy(update={"data_hash": "other"})
    assert judge(confirmed, [Trial(search.folder, search.spec, other)])["rejected"] == [
        "its runs read different data"
    ]


def test_an_edited_checkout_marks_the_row() -> None:
    assert judge(*trials(provenance={"versions": NOW, "git": {"dirty": True}})) == {
        "admitted": True,
        "rejected": [],
        "dirty": True,
    }


def test_a_mean_is_as_good_as_its_worst_task() -> None:
    good = (True, [], False)
    bad = (False, ["seed 1: no"], True)
    open_ = (None, [], False)
    assert judge_mean({"a": good, "b": good}) == {"admitted": True, "rejected": [], "dirty": False}
    assert judge_mean({"a": good, "b": open_})["admitted"] is None
    assert judge_mean({"a": open_, "b": bad}) == {
        "admitted": False,
        "rejected": ["b: seed 1: no"],
        "dirty": True,
    }


# ---- what a trial looks at ---------------------------------------------------------------------------------------------


def progress(*losses: float, half: float | None = None) -> TrialProgress:
    return TrialProgress(epochs=[{"train_loss": loss} for loss in losses], first_half_loss=half)


def test_losses_of_epochs_or_of_the_halves_of_one_are_compared() -> None:
    assert compared_losses(progress(1.0, 0.7, 0.9), 10) == (1.0, 0.7)
    assert compared_losses(progress(1.0, half=1.5), 12) == (1.5, 0.5)
    first, second = compared_losses(progress(1.0, half=1.3), 11) or (0.0, 0.0)
    assert (first, second) == (1.3, pytest.approx((11 * 1.0 - 5 * 1.3) / 6, abs=1e-12))


def test_the_halves_of_a_few_steps_tell_nothing() -> None:
    assert compared_losses(progress(1.0, half=0.5), 9) is None
    assert compared_losses(progress(1.0), 1) is None


def test_an_outputs_digest_sees_every_tensor_and_every_nan() -> None:
    one = {"loss": torch.tensor(0.5), "logits": torch.ones(2, 3), "past_key_values": object()}
    moved = one | {"logits": torch.ones(2, 3) * (1 + 1e-6)}
    broken = one | {"logits": torch.tensor([1.0, float("nan")])}
    masked = one | {"logits": torch.tensor([1.0, float("-inf")])}
    assert digest_of(one) == digest_of(dict(one)) and digest_of(one).finite
    assert digest_of(moved).sha256 != digest_of(one).sha256
    assert not digest_of(broken).finite and digest_of(masked).finite


@pytest.mark.parametrize("method", ["lora", "adapter", "lst"])
def test_a_parameter_that_trains_and_should_not_is_named(method: str) -> None:
    spec = trained_spec(method, "bert")
    resolved = resolved_tiny("bert")
    head = Head("classification", 2)
    model, _ = build_model(spec, resolved, head, weights=None)
    engine: Any = SimpleNamespace(module=model)
    assert strays(engine, spec, resolved, head, weights=None) == []
    word: Any = model.get_input_embeddings()  # type: ignore[operator]
    word.weight.requires_grad_(True)
    model.get_parameter("classifier.bias").requires_grad_(False)
    assert strays(engine, spec, resolved, head, weights=None) == [
        "bert.embeddings.word_embeddings.weight",
        "classifier.bias",
    ]


# ---- the leaderboard ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Home:
    """Two methods on two tasks; one run of `lora` on entailment trained nothing, one of `full` on agreement is of an edited checkout."""
    home = Home(tmp_path_factory.mktemp("mixed"))
    shutil.copy(empty_db, home.path)
    write_definition(home, ["full", "lora"], ["agreement", "entailment"], trials=3, seeds=[1, 2])
    for method in ("full", "lora"):
        for task in ("agreement", "entailment"):
            for spec in [make_spec(method, task, number=n) for n in range(3)] + [
                make_spec(method, task, seed=s, learning_rate=RATES[2]) for s in (1, 2)
            ]:
                bad = (method, task, spec.seed) == ("lora", "entailment", 2)
                validity = GOOD.model_copy(update={"output_changed": not bad})
                git = {"dirty": (method, task, spec.seed) == ("full", "agreement", 1)}
                write_trial(
                    home,
                    spec,
                    make_result(
                        spec,
                        validity=validity,
                        data_hash=task,
                        provenance={"versions": NOW, "git": git},
                    ),
                )
    assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
    return home


def test_rejected_rows_and_means_over_them_are_hidden_unless_asked_for(mixed: Home) -> None:
    frame = leaderboard(mixed.tracking_uri)
    shown = [(row["method"], row["task"]) for row in to_rows(frame)]
    assert sorted(shown) == [
        ("full", "agreement"),
        ("full", "entailment"),
        ("full", "mean"),
        ("lora", "agreement"),
    ]
    assert frame.attrs["hidden"] == 2
    everything = to_rows(leaderboard(mixed.tracking_uri, rejected=True))
    reasons = {
        (row["method"], row["task"]): row["rejected"]
        for row in everything
        if row["admitted"] is False
    }
    assert reasons == {
        ("lora", "entailment"): ["seed 2: training did not change the output"],
        ("lora", "mean"): ["entailment: seed 2: training did not change the output"],
    }
    assert {(row["method"], row["task"]) for row in everything if row["dirty"]} == {
        ("full", "agreement"),
        ("full", "mean"),
    }


def test_the_command_says_how_many_are_hidden_and_shows_them_with_the_reason(
    mixed: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    show(mixed.tracking_uri, fmt=Format.MD)
    printed = capsys.readouterr()
    assert "2 rows are rejected; --all shows them with the reason" in printed.err
    assert "did not change" not in printed.out and "done (dirty)" in printed.out
    show(mixed.tracking_uri, fmt=Format.MD, rejected=True)
    printed = capsys.readouterr()
    assert (
        "entailment: seed 2: training did not change the output" in printed.out
        and "rejected" not in printed.err
    )
    assert "| rejected | entailment: seed 2" in printed.out, "its status, and the reason"
    show(mixed.tracking_uri, fmt=Format.JSON, task="entailment")
    printed = capsys.readouterr()
    assert "1 row is rejected; --all shows it" in printed.err
    assert [row["admitted"] for row in json.loads(printed.out)] == [True]


def test_the_reason_of_a_rejected_row_needs_no_status_beside_it() -> None:
    row = Row(status="done", admitted=False, rejected=["seed 2: it did not train"])
    heads = [column.head for column in columns([vars(row)])]
    assert "rejected" in heads and "status" not in heads


def test_where_all_rows_are_rejected_the_error_says_so(mixed: Home) -> None:
    with pytest.raises(TrackingError, match="1 rows, and all are rejected; --all shows"):
        leaderboard(mixed.tracking_uri, method="lora", task="entailment")


def test_a_summary_keeps_the_verdict(mixed: Home) -> None:
    (cell,) = [
        c
        for c in read_cells(mixed, "demo").values()
        if (c.arm.method, c.task) == ("lora", "entailment")
    ]
    (row,) = [r for r in cell_rows(mixed) if (r.method, r.task) == ("lora", "entailment")]
    assert (row.admitted, row.rejected, row.dirty) == (
        False,
        ["seed 2: training did not change the output"],
        False,
    )
    assert all(t.spec.phase is Phase.CONFIRM for t in cell.confirm)
