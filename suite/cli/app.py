"""All commands in one place, and the one border where exceptions become messages and exit codes.

Exit codes: 0 done; 1 done, but something ended without a result, or MLflow has none of it, or this
machine failed; 2 a mistake in what was given; 129 stopped by SIGHUP, 130 by Ctrl-C, 143 by
SIGTERM.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence

import typer

from suite.cli import (
    analyze,
    compare,
    curves,
    doctor,
    export,
    init,
    leaderboard,
    listing,
    lm_eval,
    params,
    profile,
    report,
    results,
    run,
    status,
    stop,
    submit,
    sync,
    task,
    trial,
)
from suite.disk import said
from suite.errors import SuiteError
from suite.redact import printable, redact
from suite.registry import check_plug_in_roots
from suite.signals import Stopped

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "init": (
        init.init,
        "suite init my-sweep.yaml --backbone t5-base --methods full,lora,read --tasks sst2,rte",
    ),
    "run": (run.run, "suite run sweeps/quickstart.yaml --set search.trials=4"),
    "trial": (
        trial.trial,
        "suite trial --backbone minilm --method lora --task sentiment --set learning_rate=2e-3 "
        "--set rank=4",
    ),
    "status": (status.status, "suite status --home runs --sweep quickstart"),
    "submit": (
        submit.submit,
        "suite submit sweeps/quickstart.yaml --address http://HEAD:8265 --home /shared/runs",
    ),
    "stop": (stop.stop, "suite stop quickstart --address http://HEAD:8265"),
    "leaderboard": (
        leaderboard.leaderboard,
        "suite leaderboard --task sentiment --sort energy --format md",
    ),
    "report": (report.report, "suite report --sweep minilm-glue --out report"),
    "lm-eval": (
        lm_eval.lm_eval,
        "suite lm-eval --sweep shared-attention-llama --tasks hellaswag,gsm8k:5",
    ),
    "curves": (curves.curves, "suite curves read/sst2 --figure curve.png"),
    "export-results": (
        results.export_results,
        "suite export-results cluster-a.parquet --sweep read-glue-t5-base",
    ),
    "import-results": (
        results.import_results,
        "suite import-results cluster-a.parquet --home merged",
    ),
    "export": (export.export, "suite export read/rte exported/read-rte --home runs"),
    "compare": (compare.compare, "suite compare read lora --sweep minilm-glue"),
    "sync": (sync.sync, "suite sync --home runs --tracking-uri http://127.0.0.1:5000"),
    "params": (
        params.params,
        "suite params --backbone t5-base --method read --set hidden=256 --format json",
    ),
    "profile": (
        profile.profile,
        "suite profile --backbone t5-small --methods full,lora,read --compare read,full",
    ),
    "list": (listing.listing, "suite list methods"),
    "doctor": (doctor.doctor, "suite doctor --address auto --home /shared/runs"),
}
"""Name -> (function, the example under its help)."""

ANALYSES: dict[str, tuple[Callable[..., None], str]] = {
    "attention": (
        analyze.attention,
        "suite analyze attention --backbone minilm --task sentiment",
    ),
    "weights": (analyze.weights, "suite analyze weights --trial runs/trials/0123456789abcdef"),
}
"""The commands under `suite analyze`."""

TASKS: dict[str, tuple[Callable[..., None], str]] = {
    "check": (task.check, "suite task check my-tasks/caption_language.py --data-root data"),
}
"""The commands under `suite task`."""

PANELS = {
    "Run": ("init", "run", "status", "trial"),
    "Look": ("leaderboard", "report", "compare", "curves", "list", "params", "profile", "lm-eval"),
    "Take away": ("export", "export-results", "import-results"),
    "Cluster": ("doctor", "submit", "stop", "sync"),
}
"""The groups of `suite --help`, with the commands of each, the everyday ones first."""

app = typer.Typer(
    name="suite",
    help="Benchmark attention variants and parameter-efficient fine-tuning methods: same budget, "
    "same data, same loop.",
    epilog="Example: suite run sweeps/quickstart.yaml",
    no_args_is_help=True,
    # typer's own tracebacks print local variables, and those may hold a password.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_tasks = typer.Typer(help="Look at a task before anything is trained on it.", no_args_is_help=True)
_analyses = typer.Typer(
    help="Analyze attention: how alike layers are, how much they vary, how learned weights moved.",
    no_args_is_help=True,
)


def _help_of(command: Callable[..., None]) -> str:
    """The docstring with each paragraph on one line; typer would keep the lines of the source."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


# `epilog` stands last in --help, where people look for an example.
for _panel, _names in PANELS.items():
    for _name in _names:
        _command, _example = COMMANDS[_name]
        app.command(
            _name,
            help=_help_of(_command),
            epilog=f"Example: {_example}",
            rich_help_panel=_panel,
        )(_command)
for _group, _commands in ((_tasks, TASKS), (_analyses, ANALYSES)):
    for _name, (_command, _example) in _commands.items():
        _group.command(_name, help=_help_of(_command), epilog=f"Example: {_example}")(_command)
app.add_typer(_tasks, name="task", rich_help_panel="Run")
app.add_typer(_analyses, name="analyze", rich_help_panel="Look")


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    if version:
        from suite import __version__

        typer.echo(__version__)
        raise typer.Exit
    check_plug_in_roots()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; always ends in `SystemExit`.

    Args:
        arguments: What follows `suite`; None = the process's own arguments.
    """
    # Here and nowhere else: below this border every mistake is an exception with a message.
    try:
        app(args=arguments, prog_name="suite")
    except SuiteError as error:
        # Errors of stores quote URLs, which may hold a password, and files of others.
        print(printable(f"error: {redact(error)}"), file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(printable(stopped.reason), file=sys.stderr)
        raise
    except OSError as error:
        # Disks, rights and networks are the user's to mend, and a traceback does not help there.
        remedy = "and give the same command again; what had ended is kept"
        print(printable(f"error: {redact(said(error))} {remedy}"), file=sys.stderr)
        # Not 2: nothing was wrong with the command.
        sys.exit(1)
