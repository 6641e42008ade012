"""`suite task check`: what a task is like, before anything is trained on it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import complete, render
from suite.cli.options import DataRootOption, Format, TasksOption, search_first
from suite.cli.render import column, put
from suite.redact import printable

if TYPE_CHECKING:
    from suite.config.task import TaskConfig
    from suite.data.inspection import Finding, SplitFacts
    from suite.data.preview import Reader, Reading

FAMILIES = (("minilm", "bert-base"), ("t5-base",), ("gpt2",))
"""Backbones of each family: encoders, encoder-decoders, decoders. The first that is here reads."""
# Enough to see how a row is read; an article would fill the screen.
SHOWN_CHARACTERS = 600
WIDTH = 120
# 2, as for any mistake in what was given: here it is the task.
FAILED = 2
MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


class CheckFormat(StrEnum):
    """How the report is printed."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Report:
    """All that is known about a task."""

    task: TaskConfig
    file: Path
    splits: list[SplitFacts]
    readings: list[Reading]
    findings: list[Finding]

    @property
    def fit(self) -> bool:
        return all(finding.level != "fail" for finding in self.findings)

    def plain(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "task": self.task.name,
            "kind": self.task.kind,
            "file": str(self.file),
            "fit": self.fit,
            "splits": [asdict(split) for split in self.splits],
            "readings": [asdict(reading) for reading in self.readings],
            "findings": [asdict(finding) for finding in self.findings],
        }


def check(
    given: Annotated[
        str,
        typer.Argument(
            metavar="FILE|NAME",
            autocompletion=complete.tasks,
            help="A task's file, or the name of a known one (suite list tasks).",
        ),
    ],
    data_root: DataRootOption = None,
    tasks: TasksOption = None,
    backbone: Annotated[
        list[str] | None,
        typer.Option(
            "--backbone",
            metavar="B",
            help="Backbone whose tokenizer reads; may be given often (default: one a family).",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to show as each family reads them.")] = 3,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens kept of an input (default: the suite's, 128).")
    ] = None,
    target_max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens kept of an answer (default: the suite's, 16).")
    ] = None,
    fmt: Annotated[
        CheckFormat, typer.Option("--format", help="How to print the report.")
    ] = CheckFormat.TABLE,
) -> None:
    """Validate a task and look at its rows.

    The check shows sizes, labels, lengths and truncation, rows that stand in two splits, and what
    each family reads. It reads the answers of every split, test among them: it is no trial, and
    nothing that it finds reaches one. The exit code is 2 if something makes the task unfit to
    compare on.
    """
    limits = {}
    if max_length is not None:
        limits["max_length"] = max_length
    if target_max_length is not None:
        limits["target_max_length"] = target_max_length
    with render.stdout_for_result(), _found(given) as (task, file):
        report = _look(task, file, data_root, backbone, rows, limits)
    if fmt is CheckFormat.JSON:
        print(json.dumps(report.plain(), indent=2, allow_nan=False))
    else:
        _show(report)
    # After the report, because the reason stands in it.
    if not report.fit:
        raise typer.Exit(FAILED)


@contextmanager
def _found(given: str) -> Iterator[tuple[TaskConfig, Path]]:
    """The task of a file or name; a file's folder is searched first meanwhile, as with --tasks."""
    from suite.config.task import load_task, load_task_file
    from suite.config.task_files import task_paths

    path = Path(given)
    # By the name too, so that a file that is missing is not taken for a task's name.
    if path.suffix in (".yaml", ".py") or path.is_file():
        with search_first(path.parent):
            yield load_task_file(path), path
    else:
        yield load_task(given, where="FILE|NAME"), task_paths()[given]


def _look(
    task: TaskConfig,
    file: Path,
    data_root: Path | None,
    backbones: Sequence[str] | None,
    shown: int,
    limits: dict[str, int],
) -> Report:
    from suite.config.training import TrainingConfig
    from suite.data.inspection import TaskRows, inspect_rows
    from suite.data.preview import (
        check_families,
        check_lengths,
        check_metrics,
        first_objective,
        read_as,
        sample_rows,
    )

    training = TrainingConfig.model_validate(limits)
    readers = _readers(backbones)
    rows = TaskRows.read(task, data_root)
    # One sample for all families, so that their readings can be compared.
    sample = sample_rows(task, rows)
    splits, findings = inspect_rows(rows)
    readings = []
    for reader in readers:
        readings.append(read_as(reader, rows, sample, training=training, examples=shown))
    all_findings = [check_families(readings), *findings]
    # Metrics are the task's: one family is enough to compute them.
    objective = first_objective(readers, task, training)
    if objective is not None:
        all_findings += check_metrics(rows, sample, objective)
    all_findings += check_lengths(readings)
    return Report(task, file, splits, readings, all_findings)


def _readers(names: Sequence[str] | None) -> list[Reader]:
    from suite.data.preview import Reader

    choices: Sequence[Sequence[str]] = FAMILIES
    if names:
        choices = [(name,) for name in names]
    return [Reader.load(_first(choice)) for choice in choices]


def _first(names: Sequence[str]) -> Any:
    """The first backbone that is here; the last one's error where none is."""
    from suite.backbones.loading import resolve
    from suite.config.sweep import BackboneChoice
    from suite.errors import BackboneError

    # Which backbones are in the hub's cache differs from machine to machine.
    for name in names[:-1]:
        try:
            return resolve(BackboneChoice(name=name), where="--backbone", only_shape=True)
        except BackboneError:
            continue
    return resolve(BackboneChoice(name=names[-1]), where="--backbone", only_shape=True)


def _show(report: Report) -> None:
    task = report.task
    _styled(
        typer.style(task.name, bold=True),
        f", {task.kind}, version {task.version}: {task.description}",
    )
    put(f"{report.file}\n")
    _heading("splits")
    _show_splits(report)
    for reading in report.readings:
        _show_reading(reading)
    _heading("lengths in tokens")
    _show_lengths(report.readings)
    _heading("findings")
    # The texts start at one column, so that WARN and FAIL stand out.
    width = max(len(finding.check) for finding in report.findings)
    for finding in report.findings:
        _show_finding(finding, width)
    levels = [finding.level for finding in report.findings]
    verdict = "fit to compare on" if report.fit else "not fit to compare on"
    put(f"\n{verdict}: {levels.count('fail')} failed, {levels.count('warn')} to look at")


def _show_splits(report: Report) -> None:
    """Labels, or quartiles of numbers, as columns; texts that are answered more than once below."""
    from suite.config.task import LabelTask

    task = report.task
    facts = report.splits
    columns = [column("split"), column("source", "from"), column("rows", show=render.count)]
    if isinstance(task, LabelTask):
        # A regression's answers are quartiles, a classification's are shares of the rows.
        show = render.brief if task.is_regression else _percent
        for word in facts[0].answers:
            columns.append(column(f"answer {word}", _short(word, 24), show))
    elif facts[0].distinct_answers:
        columns.append(column("distinct_answers", "different answers", render.count))
    rows = []
    for fact in facts:
        row = asdict(fact)
        for word, share in fact.answers.items():
            row[f"answer {word}"] = share
        rows.append(row)
    render.render(rows, columns, Format.TABLE)
    if not isinstance(task, LabelTask):
        for fact in facts:
            _show_common_answers(fact)
    put()


def _show_common_answers(fact: SplitFacts) -> None:
    """Texts that answer more than one row of a split."""
    common = []
    for text, share in fact.answers.items():
        count = round(share * fact.rows)
        # An answer of one row is common to nothing.
        if count > 1:
            common.append(f"{count} x {_short(text, 60)!r}")
    if common:
        _paragraph(f"  common in {fact.split}: ", ", ".join(common), indent=4)


def _show_reading(reading: Reading) -> None:
    tokenizer = ""
    if reading.draft:
        tokenizer = ", bytes for its tokenizer"
    _heading(f"as {_article(reading.kind)} reads it ({reading.backbone}{tokenizer})")
    if reading.refused is not None:
        put(f"  cannot: {reading.refused}")
    for example in reading.examples:
        for number, text in enumerate(example.reads):
            _paragraph(f"  {example.row if not number else '':<16}reads    ", text, indent=27)
        _paragraph(f"  {'':<16}answers  ", example.answers, indent=27)
    put()


def _show_lengths(readings: Sequence[Reading]) -> None:
    rows = []
    for reading in readings:
        backbone = reading.backbone
        if reading.draft:
            backbone += " (bytes)"
        for lengths in reading.lengths:
            rows.append({"backbone": backbone, **asdict(lengths)})
    columns = [
        column("backbone"),
        column("what", "of"),
        column("p50", show=render.count),
        column("p90", show=render.count),
        column("p99", show=render.count),
        column("longest", "max", render.count),
        column("at_most", "kept", render.count),
        column("cut_frac", "cut", _percent),
    ]
    render.render(rows, columns, Format.TABLE)
    put()


def _show_finding(finding: Finding, width: int) -> None:
    mark = typer.style(
        MARKS[finding.level], fg=COLOURS[finding.level], bold=finding.level == "fail"
    )
    _paragraph(f"  {mark}  {finding.check:<{width}}  ", finding.text, indent=width + 10)
    # Examples show where to look; a check that passed needs none.
    if finding.level != "ok":
        for example in finding.examples:
            _paragraph(" " * (width + 10), _short(example, 200), indent=width + 10)


def _styled(styled: str, rest: str = "") -> None:
    # `put` would write the commands of our own style out too.
    typer.echo(styled + printable(rest))


def _heading(text: str) -> None:
    _styled(typer.style(printable(text), bold=True))


def _paragraph(before: str, text: str, *, indent: int) -> None:
    """Text with line breaks shown as such, wrapped under its own beginning, at column `indent`."""
    shown = printable(_short(text.replace("\n", "\\n"), SHOWN_CHARACTERS))
    lines = textwrap.wrap(shown, WIDTH - indent, break_on_hyphens=False) or ["(nothing)"]
    _styled(before, ("\n" + " " * indent).join(lines))


def _short(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[:most]}... ({len(text):,} characters)"


def _percent(share: float | None) -> str:
    return render.number(share, ".1%")


def _article(kind: str) -> str:
    if kind[0] in "aeiou":
        return f"an {kind}"
    return f"a {kind}"
