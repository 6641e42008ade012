"""`suite init`: a sweep file from flags and from answers, checked before it is written."""

from __future__ import annotations

import io
import os
import pty
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml

from suite.cli.app import main
from suite.cli.sweep_text import PRESETS, Answers, Budget, sweep_text
from suite.config.loader import parse_yaml, validate
from suite.config.sweep import SweepConfig
from suite.config.sweep_files import load_sweep
from tests.commands import Suite, suite
from tests.ranks import in_processes

__all__ = ["suite"]
FLAGS = ("--backbone", "minilm", "--methods", "lora,bitfit", "--tasks", "entailment")


def test_flags_make_a_sweep_that_the_loader_takes(suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    code, out, err = suite(
        "init",
        path,
        *FLAGS,
        "--attention",
        "pretrained,gqa",
        "--trials",
        3,
        "--seeds",
        2,
        "--budget",
        "quick",
    )
    assert (code, err) == (0, "")
    config = load_sweep(path)
    assert (config.name, config.search.trials, config.confirm.seeds, config.resources.workers) == (
        "mine",
        3,
        [1, 2],
        1,
    )
    assert [m.name for m in config.methods] == ["lora", "bitfit"] and [
        a.name for a in config.attention
    ] == ["pretrained", "gqa"]
    assert f"suite run {path} --dry-run" in out
    assert out.startswith(f"{path}: 4 cells, "), "2 methods x 2 attention x 1 task"
    path = tmp_path / "contest.yaml"
    out = suite("init", path, *FLAGS, "--attention", "pretrained,gqa", "--budget", "standard")[1]
    assert out.startswith(f"{path}: 8 cells, "), (
        "lora brings three architectures: (3 + 1) x 2 attention x 1 task"
    )


def test_a_variant_that_is_given_is_compared_with_the_backbone_as_it_is_like_one_that_is_answered(
    suite: Suite, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    assert suite("init", path, *FLAGS, "--attention", "gqa")[0] == 0
    assert [a.name for a in load_sweep(path).attention] == ["pretrained", "gqa"]


@pytest.mark.parametrize(
    ("task", "lengths"), [("gsm8k", (256, None)), ("ptb", (16, 64)), ("sentiment", (16, None))]
)
def test_answers_and_windows_get_the_lengths_that_their_kind_needs(
    suite: Suite, tmp_path: Path, task: str, lengths: tuple[int, int | None]
) -> None:
    path = tmp_path / "mine.yaml"
    given = ("--backbone", "gpt2", "--methods", "full", "--tasks", task)
    assert suite("init", path, *given, "--budget", "quick")[::2] == (0, "")
    training = load_sweep(path).training
    assert (training.target_max_length, training.stride) == lengths


@pytest.mark.parametrize("budget", Budget)
def test_every_key_of_the_file_is_explained(budget: Budget) -> None:
    kinds = {"generation", "language-model"}
    answers = Answers(["minilm"], ["pretrained"], ["peft:ia3"], ["rte"], budget)
    text = sweep_text("s", answers, kinds)
    data, lines = parse_yaml(text, where="s.yaml")
    config = validate(SweepConfig, data, where="s.yaml", lines=lines)
    assert config.search.trials == PRESETS[budget].trials and config.methods[0].name == "peft:ia3"
    written = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert all(" # " in line for line in written)
    assert max(map(len, text.splitlines())) <= 140


def test_a_name_that_yaml_would_misread_stays_a_name() -> None:
    data = yaml.safe_load(
        sweep_text(
            "2026-11-21",
            Answers(["yes", "a: b", "x, y"], ["pretrained"], ["lora"], ["1e3"], Budget.QUICK),
        )
    )
    assert (data["name"], data["backbones"], data["tasks"]) == (
        "2026-11-21",
        ["yes", "a: b", "x, y"],
        ["1e3"],
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--methods", "lorra"), "unknown method 'lorra'; did you mean lora?"),
        (("--attention", "gqqa"), "unknown attention variant 'gqqa'; did you mean gqa"),
        (("--tasks", "entailmnt"), "unknown task 'entailmnt'; did you mean entailment or"),
        (("--backbone", "minlm"), "unknown backbone 'minlm'; did you mean minilm?"),
        (("--attention", "mhe-add"), "mhe-add"),
        (("--workers", "5"), "expected a multiple of 5 (5 workers)"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(
    suite: Suite, tmp_path: Path, changes: tuple[str, ...], said: str
) -> None:
    code, out, err = suite("init", tmp_path / "s.yaml", *FLAGS, "--budget", "quick", *changes)
    assert (code, out) == (2, "") and said in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_overwritten_only_by_force(suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("precious")
    code, _, err = suite("init", path, "--yes")
    assert code == 2 and "--force" in err and path.read_text() == "precious"
    assert suite("init", path, *FLAGS, "--force")[0] == 0
    assert load_sweep(path).name == "s"


def test_a_name_that_is_no_yaml_file_is_refused(suite: Suite, tmp_path: Path) -> None:
    code, _, err = suite("init", tmp_path / "sweep", "--yes")
    assert code == 2 and "ends in .yaml" in err


def test_without_a_terminal_it_says_which_options_are_missing(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, err = suite("init", tmp_path / "s.yaml", "--backbone", "minilm")
    assert code == 2 and "give --methods, --tasks, or --yes" in err
    assert suite("init", tmp_path / "s.yaml", "--backbone", "minilm", "--yes")[0] == 0


def at_a_terminal(_number: int, folder: Path, typed: bytes) -> tuple[int, str, str]:
    """`suite init asked.yaml` with a terminal as its input: (exit code, stdout, stderr)."""
    ours, theirs = pty.openpty()
    os.write(ours, typed)
    os.dup2(theirs, 0)
    sys.stdin = os.fdopen(0)
    os.chdir(folder)
    with (
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as ended,
    ):
        main(["init", "asked.yaml"])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def test_on_a_terminal_four_questions_are_asked_and_a_wrong_answer_again(tmp_path: Path) -> None:
    typed = b"\nlora,gqqa\nlora,gqa\n\npaper\n"
    ((code, out, err),) = in_processes(at_a_terminal, tmp_path, typed)
    assert code == 0, err
    assert "unknown method or attention variant 'gqqa'; did you mean gqa" in err and "next:" in out
    config = load_sweep(tmp_path / "asked.yaml")
    assert [a.name for a in config.attention] == ["pretrained", "gqa"], (
        "a variant is compared with the backbone as it is"
    )
    assert [m.name for m in config.methods] == ["lora"] and config.search.trials == 32
    assert (config.backbones[0].name, config.tasks) == ("minilm", ["sentiment"])
