"""`suite init`: a first sweep file, from questions or options, and a task on files of one's own."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from suite.cli import complete
from suite.cli.options import any_names, search_first
from suite.cli.plug_ins import method_names, variant_names
from suite.cli.render import put
from suite.cli.sweep_text import Answers, Budget, sweep_text
from suite.errors import ConfigError, SuiteError, UnknownNameError

if TYPE_CHECKING:
    from suite.config.task_base import FileData
    from suite.plan.plan import Plan

T = TypeVar("T")
BACKBONES = ("minilm",)
METHODS = ("full", "lora", "read")
TASKS = ("sentiment",)
"""Defaults of the questions; none of them needs a download."""
PRETRAINED = "pretrained"
DEFAULT = Path("my-sweep.yaml")


def init(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="The file to write; its stem is the sweep's name."),
    ] = DEFAULT,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="B,...",
            autocompletion=complete.listed(complete.backbones),
            help="Backbones, with commas between them.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="M,...",
            autocompletion=complete.listed(complete.methods),
            help="Fine-tuning methods.",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="V,...",
            autocompletion=complete.listed(complete.attention),
            help="Attention variants, beside pretrained.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="T,...", autocompletion=complete.listed(complete.tasks), help="Tasks."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Write a task for your own file (CSV, TSV, JSON lines, parquet). For several: "
            "--data train=FILE --data test=FILE.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="COLUMN,...", help="With --data: the columns that a model reads."),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="With --data: the column of the answer.")
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(metavar="CHARACTER", help="Of CSV, instead of the one that is found."),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the files, such as cp1252, instead of UTF-8."),
    ] = None,
    budget: Annotated[
        Budget | None,
        typer.Option(
            help="quick = few rows, for CPUs; paper = READ's 32 trials. "
            "(default: standard with a GPU, else quick)"
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials of a search, instead of the budget's.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Confirm runs per cell.")] = 5,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Workers of a trial. (default: 1 for quick, else decided when the sweep starts)",
        ),
    ] = None,
    gpus_per_worker: Annotated[
        float | None, typer.Option(min=0, help="GPUs of a worker; 0 = train on CPUs.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing; what is not given is the default.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented sweep file, and with --data a task on files of your own.

    On a terminal the command asks up to four questions, about what the options leave open. It
    checks the answers before it writes.
    """
    # First, because nobody wants to answer four questions and then be refused.
    _refuse_to_overwrite(path, force=force)
    _refuse_without_data(data, text=text, label=label, delimiter=delimiter, encoding=encoding)
    ask = _asker(
        # Who names data has something to compare on; of the rest the defaults do.
        yes=yes or (data is not None and not sys.stdin.isatty()),
        needed={"--backbone": backbone, "--methods": methods or attention, "--tasks": tasks},
    )
    own = None
    if data is not None:
        own = _own_task(data, text, label, delimiter, encoding, ask, force=force)
    backbones = _names(backbone) or ask("Which backbones? (suite list backbones)", BACKBONES, _some)
    if methods is None and attention is None:
        chosen = ask(
            "Which methods or attention variants? (suite list methods, suite list attention)",
            METHODS,
            _split,
        )
    else:
        # Variants alone are trained whole: that is how their papers train them.
        chosen = (_names(methods) or ("full",), _beside_unchanged(_names(attention)))
    known = _names(tasks)
    if own is not None:
        known = (own.path.stem, *known)
    elif not known:
        known = ask("On which tasks? (suite list tasks)", TASKS, _known_tasks)
    size = budget or ask(
        "How much: quick (CPUs, few rows), standard, or paper (32 trials per architecture)?",
        (_usual_budget(),),
        _budget,
    )
    answers = Answers(
        backbones, chosen[1], chosen[0], known, size, trials, seeds, workers, gpus_per_worker
    )
    # Checked as a whole before anything is written: a wrong answer leaves no file.
    with _known_for_now(own):
        sweep = sweep_text(path.stem, answers, _kinds(known))
        plan = _checked(sweep, path)
    if own is not None:
        _write(own.path, own.text)
    _write(path, sweep)
    _say_what_next(path, plan, own)


@dataclass(frozen=True, slots=True)
class _OwnTask:
    """A task on files of the user's own.

    Attributes:
        path: Where it is written; its stem is the task's name.
        text: Its YAML.
        found: What the rows are, in one line.
    """

    path: Path
    text: str
    found: str


def _refuse_without_data(data: list[str] | None, **others: str | None) -> None:
    for name, value in others.items():
        if data is None and value is not None:
            raise ConfigError(
                f"--{name} {value}: says how a file of rows is read; give --data FILE"
            )


def _own_task(
    given: Sequence[str],
    text: str | None,
    label: str | None,
    delimiter: str | None,
    encoding: str | None,
    ask: _Asker,
    *,
    force: bool,
) -> _OwnTask:
    """A task on the files of `--data`, from the columns that are named or asked for.

    Raises:
        SuiteError: The files cannot be read, or have no such columns; nothing was written.
    """
    from suite.cli.task_text import Files, check_columns, files_of, task_text
    from suite.config.own_data import read_file

    files = files_of(given, delimiter, encoding)
    path = _task_path(Path(files.paths["train"]), force=force)
    files = _not_mistaken(files, path)
    columns = ", ".join(read_file(files, "train").columns)

    def read_texts(answer: str) -> tuple[str, ...]:
        check_columns(files, _names(answer), option="--text")
        return _names(answer)

    def read_label(answer: str) -> str:
        names = _names(answer)
        check_columns(files, names, option="--label")
        if len(names) > 1:
            raise ConfigError(
                f"--label {answer}: {len(names)} columns, and a task asks for one label; make a "
                "task for each (suite init with another --label), and list the tasks in one sweep"
            )
        return names[0]

    if text is None:
        texts = ask(f"Which columns are read, of {columns}?", (), read_texts)
    else:
        texts = read_texts(text)
    if label is None:
        answer = ask(f"Which column is the label, of {columns}?", (), read_label)
    else:
        answer = read_label(label)
    if answer in texts:
        raise ConfigError(f"--label {answer}: is one of --text, and the answer must not be read")
    if len(texts) > 2:
        raise ConfigError(
            f"--text: {len(texts)} columns, expected one or two; more are joined in a task's file "
            "(pair, in docs/adding.md)"
        )
    return _OwnTask(path, *task_text(Files(files, texts, answer)))


def _not_mistaken(files: FileData, path: Path) -> FileData:
    """The files, with whole paths where a task's file would find others by these names.

    A task looks beside its own file first, and `--data` in the working folder.
    """
    from suite.config.own_data import folder_of
    from suite.config.task_base import FILE_KEYS

    found = folder_of(files, path)
    whole = {}
    for key in FILE_KEYS:
        name = getattr(files, key)
        if name is not None and (found / name).resolve() != Path(name).resolve():
            whole[key] = str(Path(name).resolve())
    return files.model_copy(update=whole)


def _task_path(data: Path, *, force: bool) -> Path:
    """Where the task on a file is written: in `tasks/`, by the name of the file.

    Raises:
        ConfigError: A task stands there already.
    """
    from suite.config.reference import MEAN
    from suite.registry import yaml_names

    stem = re.sub(r"[^\w-]+", "-", data.name.split(".")[0]).strip("-_") or "mine"
    folder = Path("tasks")
    path = folder / f"{stem}.yaml"
    known = yaml_names("tasks").get(stem)
    # A task that the suite brings keeps its name, or tables would show two things as one.
    # Nor may a task be called as the mean over tasks is.
    if stem == MEAN or (known is not None and known.resolve() != path.resolve()):
        path = folder / f"own-{stem}.yaml"
    if path.exists() and not force:
        raise ConfigError(f"{path}: is there already; --force overwrites it")
    return path


@contextmanager
def _known_for_now(own: _OwnTask | None) -> Iterator[None]:
    """Within the block a task that is not yet written is known by its name."""
    if own is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / own.path.name).write_text(own.text, encoding="utf-8")
        with search_first(Path(folder)):
            yield


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks on a terminal until the answer can be used; a silent one takes the default."""

    silent: bool

    def __call__(self, question: str, default: Sequence[str], read: Callable[[str], T]) -> T:
        while True:
            usual = ",".join(default)
            if self.silent:
                given = usual
            else:
                # On stderr: stdout may be piped, and questions are no result.
                given = typer.prompt(question, default=usual or None, err=True)
            try:
                return read(given)
            except ConfigError as error:
                if self.silent:
                    raise
                put(f"  {error}", err=True)


def _asker(*, yes: bool, needed: Mapping[str, str | None]) -> _Asker:
    """The asker for what the options leave open: a person, or the defaults.

    Raises:
        ConfigError: Options are missing, and there is no terminal to ask on.
    """
    missing = [option for option, given in needed.items() if given is None]
    # Without a terminal, as in a job or a pipe, nobody can answer.
    terminal = sys.stdin.isatty()
    if missing and not yes and not terminal:
        raise ConfigError(
            f"suite init: no terminal to ask on; give {', '.join(missing)}, or --yes for the "
            "defaults of what is not given"
        )
    return _Asker(silent=yes or not terminal)


def _names(given: str | None) -> tuple[str, ...]:
    return tuple(any_names(given or ""))


def _some(given: str) -> tuple[str, ...]:
    names = _names(given)
    if not names:
        raise ConfigError("expected at least one name")
    return names


def _split(given: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Methods and attention variants out of one list.

    Variants without a method are trained by `full`, beside the unchanged backbone.
    """
    variants = variant_names()
    known = {*method_names(), *variants}
    chosen = []
    attention = []
    for name in _some(given):
        # peft's own types are no names of the registry; its loader checks them later.
        if name not in known and not name.startswith("peft:"):
            raise UnknownNameError("method or attention variant", name, known)
        if name in variants:
            attention.append(name)
        else:
            chosen.append(name)
    return tuple(chosen) or ("full",), _beside_unchanged(attention)


def _beside_unchanged(attention: Sequence[str]) -> tuple[str, ...]:
    """The variants after the backbone's own attention, which shows what they cost and gain."""
    return tuple(dict.fromkeys((PRETRAINED, *attention)))


def _kinds(tasks: Sequence[str]) -> set[str]:
    """The kinds of tasks; the check of the whole sweep refuses those that cannot be loaded."""
    from suite.config.task import load_task

    kinds: set[str] = set()
    for name in tasks:
        with suppress(SuiteError):
            kinds.add(load_task(name).kind)
    return kinds


def _known_tasks(given: str) -> tuple[str, ...]:
    from suite.config.task_files import task_paths

    names = _some(given)
    for name in names:
        if name not in task_paths():
            raise UnknownNameError("task", name, task_paths())
    return names


def _budget(given: str) -> Budget:
    if given not in list(Budget):
        raise UnknownNameError("budget", given, list(Budget))
    return Budget(given)


def _usual_budget() -> str:
    from suite.plan.resources import may_have_gpu

    # Asking torch would take seconds before the first question.
    if may_have_gpu():
        return Budget.STANDARD
    return Budget.QUICK


def _refuse_to_overwrite(path: Path, *, force: bool) -> None:
    # Checked first, so that `suite init sst2` does not make a file of that name.
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: expected a file name that ends in .yaml")
    if path.exists() and not force:
        raise ConfigError(
            f"{path}: is there already; give another name, or --force to overwrite it"
        )


def _checked(text: str, path: Path) -> Plan:
    """The plan of the sweep, made by the loader and planner that `suite run` uses.

    It is kept for the dry run that often follows.

    Raises:
        SuiteError: A name does not exist, or choices do not go together; nothing was written.
    """
    from suite.cli.kept_plan import checked_plan
    from suite.config.loader import parse_yaml, validate
    from suite.config.sweep import SweepConfig

    data, lines = parse_yaml(text, where=str(path))
    config = validate(SweepConfig, data, where=str(path), lines=lines)
    return checked_plan(config, where=str(path), world_size=None)[0]


def _write(path: Path, text: str) -> None:
    from suite.files import write_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    # A path that cannot be written is the user's to mend, and needs no traceback.
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error


def _say_what_next(path: Path, plan: Plan, own: _OwnTask | None) -> None:
    if own is not None:
        put(f"{own.path}: {own.found}")
    put(f"{path}: {len(plan.cells)} cells, {plan.total_trials} trials planned")
    put("next:")
    if own is not None:
        put(f"  suite task check {own.path.stem}   what a model reads, and what is odd")
    put(f"  suite run {path} --dry-run   what it would take")
    put(f"  suite run {path}             the same again goes on after a stop")
