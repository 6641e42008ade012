"""Options that several commands share, each described once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from suite.cli import complete
from suite.config import variables
from suite.config.trust import trusting
from suite.config.variables import environment
from suite.errors import ConfigError
from suite.redact import refuse_password
from suite.registry import TASK_FOLDERS


class Format(StrEnum):
    """How a table is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"

    @property
    def for_people(self) -> bool:
        """Whether people read it, and not programs."""
        return self in (Format.TABLE, Format.MD)


SELDOM = "Clusters, stores and trust"
"""Panel of `--help` for options that most runs do without, below the everyday ones."""
HomeOption: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--home", metavar="DIR", envvar=variables.HOME, help="Where trials and mlflow.db live."
    ),
]
DataRootOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        metavar="DIR",
        envvar=variables.DATA_ROOT,
        help="Local data, not the hub: <split>.parquet or .csv in DIR/<hub id>/<config>.",
    ),
]


def was_typed(context: typer.Context, name: str) -> bool:
    """Whether a parameter's value was typed, and is neither its default nor the environment's.

    The value does not tell: a default can be typed, too.
    """
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def no_password(context: typer.Context, option: typer.CallbackParam, url: str | None) -> str | None:
    """Refuse a URL that holds a password on the command line, which every user of a machine sees.

    Raises:
        ConfigError: The URL holds a password.
    """
    # From the environment a password is welcome: only its user can read that.
    if was_typed(context, option.name or ""):
        server = "; for a server, use MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        # A mistake that is refused needs the way that works, and each option has its own.
        own = {
            "tracking_uri": f"put the whole URL into MLFLOW_TRACKING_URI{server}",
            "storage": f"put it into {variables.STORAGE}",
            "optuna": f"put it into {variables.OPTUNA}",
        }
        refuse_password(url, option=option.opts[0], instead=own[str(option.name)])
    return url


def one_storage(context: typer.Context, option: typer.CallbackParam, url: str | None) -> str | None:
    """A storage's URL as jobs and homes are told apart by it.

    Raises:
        ConfigError: As `no_password`.
    """
    from suite.storage.urls import one_url

    url = no_password(context, option, url)
    return None if url is None else one_url(url)


StorageOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        envvar=variables.STORAGE,
        callback=one_storage,
        help="Bucket that keeps trials and results, for hosts that share no disk: "
        "s3://BUCKET/PREFIX.",
        rich_help_panel=SELDOM,
    ),
]


TrackingOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        metavar="URI",
        callback=no_password,
        help="MLflow store. (default: $MLFLOW_TRACKING_URI, else mlflow.db in --home)",
        rich_help_panel=SELDOM,
    ),
]


OptunaOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--optuna",
        metavar="URL",
        envvar=variables.OPTUNA,
        callback=no_password,
        help="Mirror the studies there, for optuna-dashboard: postgresql://..., sqlite:///PATH or "
        "journal:///PATH.",
        rich_help_panel=SELDOM,
    ),
]


def use_trusted(context: typer.Context, items: list[str] | None) -> list[str] | None:
    """Let these checkpoints run their own code, here and in the workers, until the command ends.

    Raises:
        ConfigError: An item is not NAME@COMMIT.
    """
    # A shell that completes a line parses it too, and must trust nothing.
    if items and not context.resilient_parsing:
        context.with_resource(trusting(items))
    return items


TrustOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--trust-remote-code",
        metavar="NAME@COMMIT",
        callback=use_trusted,
        help="Run the code that this backbone brings, at this commit. Read it first: it can do "
        "all that you can.",
        rich_help_panel=SELDOM,
    ),
]
InsecureOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Use a Ray cluster that asks nobody for a token.", rich_help_panel=SELDOM
    ),
]
RetryOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--retry-given-up",
        help="Try trials again that used up their retries (suite status names them).",
        rich_help_panel=SELDOM,
    ),
]


def use_tasks(context: typer.Context, folder: Path | None) -> Path | None:
    """Search a folder of tasks before all others, here and in the workers, until the command ends.

    Raises:
        ConfigError: The folder holds no task.
    """
    # A shell that completes a line parses it too, and must not search folders.
    if folder is None or context.resilient_parsing:
        return folder
    if not any(folder.glob("*.yaml")) and not any(folder.glob("*.py")):
        raise ConfigError(
            f"--tasks {folder}: holds no *.yaml and no *.py; expected a folder whose files are "
            "tasks"
        )
    context.with_resource(search_first(folder))
    return folder


@contextmanager
def search_first(folder: Path) -> Iterator[None]:
    """Within the block, the tasks of this folder hide others of the same names."""
    folders = [str(folder.resolve())]
    before = os.environ.get(TASK_FOLDERS)
    if before:
        folders.append(before)
    # In the environment, because worker processes inherit it.
    with environment({TASK_FOLDERS: os.pathsep.join(folders)}):
        yield


TasksOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tasks",
        metavar="DIR",
        callback=use_tasks,
        help="A folder whose *.yaml and *.py are tasks, searched first.",
    ),
]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one value; may be given often."),
]
OnlySweepOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="NAME",
        autocompletion=complete.sweeps_of_home,
        help="Only this sweep.",
    ),
]
OnlyTaskOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--task", metavar="T", autocompletion=complete.tasks, help="Only this task."),
]
AddressOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDR",
        help="A running Ray cluster, or auto (default: this machine).",
        rich_help_panel=SELDOM,
    ),
]
FormatOption: TypeAlias = Annotated[
    Format, typer.Option("--format", help="How to print the result.")
]
BackboneOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--backbone",
        metavar="B",
        autocompletion=complete.backbones,
        help="A known name, hub id, folder or package:NAME/FOLDER.",
    ),
]
MethodOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="M",
        autocompletion=complete.methods,
        help="A PETL method (suite list methods), or peft:<type>.",
    ),
]
AttentionOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--attention",
        metavar="V",
        autocompletion=complete.attention,
        help="An attention variant (suite list attention).",
    ),
]


def split_names(text: str) -> list[str]:
    """`full,read` as a list of names, each once.

    Raises:
        ConfigError: There is no name.
    """
    names = any_names(text)
    if not names:
        raise ConfigError(f"{text!r}: expected names with commas between them, as full,read")
    return names


def any_names(text: str) -> list[str]:
    """The names in a text with commas between them, each once; there may be none."""
    # A list, because the order of the names is the order of the table.
    names = []
    for part in text.split(","):
        name = part.strip()
        if name and name not in names:
            names.append(name)
    return names


def home_to_read(home: Path, tracking_uri: str | None) -> Path:
    """The home of a command that reads MLflow; it holds trials unless a store is named.

    Raises:
        ConfigError: The store would be the home's own, and the home holds no trials.
    """
    # A store elsewhere has all that these commands show, on machines without the trial folders.
    if tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return home
    return existing_home(home)


def existing_home(path: Path) -> Path:
    """The same path, if trials were ever run there.

    Raises:
        ConfigError: No trial was run there.
    """
    from suite.record.folder import DATABASE

    # MLflow makes an empty store wherever it is pointed: a typing error must not look empty.
    if not (path / "trials").is_dir() and not (path / DATABASE).exists():
        raise ConfigError(
            f"--home {path}: holds no trials; expected a folder that `suite run` wrote to"
        )
    return path
