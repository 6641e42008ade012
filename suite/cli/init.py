"""`suite init`: a first sweep file, from four questions or from options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from suite.cli import complete
from suite.cli.plug_ins import method_names, variant_names
from suite.cli.sweep_text import Answers, Budget, sweep_text
from suite.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from suite.plan.plan import Plan

T = TypeVar("T")
BACKBONES = ("minilm",)
METHODS = ("full", "lora", "read")
TASKS = ("acceptability", "entailment")
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
    """Write a commented sweep file.

    On a terminal the command asks up to four questions, about what the options leave open. It
    checks the answers before it writes.
    """
    # First, because nobody wants to answer four questions and then be refused.
    _refuse_to_overwrite(path, force=force)
    ask = _asker(
        yes=yes,
        needed={"--backbone": backbone, "--methods": methods or attention, "--tasks": tasks},
    )
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
    known = _names(tasks) or ask("On which tasks? (suite list tasks)", TASKS, _known_tasks)
    size = budget or ask(
        "How much: quick (CPUs, few rows), standard, or paper (32 trials per architecture)?",
        (_usual_budget(),),
        _budget,
    )
    answers = Answers(
        backbones, chosen[1], chosen[0], known, size, trials, seeds, workers, gpus_per_worker
    )
    # Checked as a whole before anything is written: a wrong answer leaves no file.
    text = sweep_text(path.stem, answers)
    plan = _checked(text, path)
    _write(path, text)
    _say_what_next(path, plan)


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
                given = typer.prompt(question, default=usual, err=True)
            try:
                return read(given)
            except ConfigError as error:
                if self.silent:
                    raise
                typer.echo(f"  {error}", err=True)


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
    """Names with commas between them, each once."""
    # A dict, because a set would lose the order in which the names were typed.
    found: dict[str, None] = {}
    for part in (given or "").split(","):
        if part.strip():
            found[part.strip()] = None
    return tuple(found)


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


def _known_tasks(given: str) -> tuple[str, ...]:
    from suite.config.task_files import task_paths

    for name in _some(given):
        if name not in task_paths():
            raise UnknownNameError("task", name, task_paths())
    return _some(given)


def _budget(given: str) -> Budget:
    if given not in list(Budget):
        raise UnknownNameError("budget", given, list(Budget))
    return Budget(given)


def _usual_budget() -> str:
    # By its device file: asking torch would take seconds before the first question.
    if any(Path("/dev").glob("nvidia[0-9]*")):
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


def _say_what_next(path: Path, plan: Plan) -> None:
    print(f"{path}: {len(plan.cells)} cells, {plan.total_trials} trials at least")
    print("next:")
    print(f"  suite run {path} --dry-run   what it would take")
    print(f"  suite run {path}             the same again goes on after a stop")
