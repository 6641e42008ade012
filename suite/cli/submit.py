"""`suite submit`: run a sweep as a job of a Ray cluster that is elsewhere.

`suite status --address` shows these jobs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from suite.cli import complete, render
from suite.cli.options import (
    SELDOM,
    Format,
    InsecureOption,
    OptunaOption,
    RetryOption,
    SetOption,
    StorageOption,
    TrustOption,
    no_password,
    search_first,
)
from suite.cli.render import Column, column, put
from suite.cli.run import Asked
from suite.config.hashing import short_hash
from suite.config.variables import OPTUNA
from suite.errors import ConfigError
from suite.redact import has_password, refuse_password
from suite.registry import TASK_FOLDERS, find_sweep
from suite.signals import STOPPED

if TYPE_CHECKING:
    from suite.cluster.jobs import Job, JobClient
    from suite.config.sweep import SweepConfig

EXIT_CODES = {"SUCCEEDED": 0, "STOPPED": STOPPED}
# With --storage these are caches: what counts lies in the storage. `run_sweep` checks their owner.
LOCAL_HOMES = "/tmp/suite-home"  # noqa: S108
DashboardOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="URL",
        envvar="RAY_API_SERVER_ADDRESS",
        help="Dashboard of a Ray cluster, http://HEAD:8265.",
    ),
]


def submit(
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP",
            autocompletion=complete.sweeps,
            help="A sweep file in the working folder, or the name of a known one.",
        ),
    ],
    address: DashboardOption = None,
    home: Annotated[
        Path | None,
        typer.Option(
            "--home",
            metavar="DIR",
            help="Home on the cluster: an absolute path that every node sees.",
        ),
    ] = None,
    storage: StorageOption = None,
    data_root: Annotated[
        Path | None,
        typer.Option(
            "--data-root",
            metavar="DIR",
            help="Folder on the cluster that holds the data, instead of the hub.",
        ),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option("--tasks", metavar="DIR", help="A folder of tasks, in the working folder."),
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            "--tracking-uri",
            metavar="URI",
            callback=no_password,
            help="MLflow store. (default: $MLFLOW_TRACKING_URI of the head, else mlflow.db in "
            "--home)",
            rich_help_panel=SELDOM,
        ),
    ] = None,
    optuna: OptunaOption = None,
    overrides: SetOption = None,
    trust: TrustOption = None,
    insecure: InsecureOption = False,
    retry_given_up: RetryOption = False,
    working_dir: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder to upload; the driver and its workers run in it."),
    ] = Path("."),
    detach: Annotated[
        bool, typer.Option("--detach", help="Return at once; the sweep runs on.")
    ] = False,
) -> None:
    """Run a sweep on a cluster, or follow it where it runs already.

    Ctrl-C ends the following, not the sweep.
    """
    from suite.cluster.access import require_token
    from suite.cluster.jobs import JobClient, Submission, dashboard_url
    from suite.cluster.package import check_size

    # Links resolved: paths are compared with it to see what lies inside.
    folder = working_dir.resolve()
    if not folder.is_dir():
        raise ConfigError(f"--working-dir {working_dir}: no such folder (looked from {Path.cwd()})")
    found = find_sweep(sweep)
    config, relative_tasks = _loaded(found, folder, tasks, overrides or ())
    # The command becomes part of the job, which the dashboard shows to everybody.
    refuse_password(
        storage,
        option="--storage",
        instead="give it to the cluster's machines: their role, or ~/.aws",
    )
    optuna = _without_password(optuna)
    # Checked here: on the cluster the same mistake would cost a queue's wait.
    place = cluster_home(home, storage)
    _check_stores(place, tracking_uri, optuna, storage)
    asked = Asked(
        sweep=_sweep_there(found, folder),
        path=found,
        home=place,
        data_root=data_root,
        # The driver runs inside the cluster, which it finds by itself.
        address="auto",
        tracking_uri=tracking_uri,
        overrides=tuple(overrides or ()),
        tasks=relative_tasks,
        storage=storage,
        trust=tuple(trust or ()),
        insecure=insecure,
        # Added below: here it would be left out if it stands in a variable, which a job has not.
        optuna=None,
    )
    command = _command(asked, optuna, retry_given_up=retry_given_up)
    url = dashboard_url(_required(address))
    variables = _variables(folder)
    if not insecure:
        require_token(url)  # before anything is sent there
    cluster = JobClient(url)
    # Ray uploads the whole folder; one with data in it would take for ever.
    size = check_size(folder)
    wanted = Submission(
        config.name, storage or str(place), command, folder, variables, config.failures.grace_s
    )
    job, is_new = cluster.submit(wanted)
    if is_new:
        what = f"submitted, with {size / 2**20:.1f} MiB of {folder}"
    else:
        what = "is running already; following it"
    put(f"sweep {config.name}: {what} (job {job.id})", err=True)
    if detach:
        return _say_how_to_go_on(cluster, job, sweep)
    _follow(cluster, job, sweep, attached=not is_new)


def _loaded(
    found: Path, folder: Path, tasks: Path | None, overrides: Sequence[str]
) -> tuple[SweepConfig, Path | None]:
    """The sweep as the cluster will read it, and its folder of tasks as the cluster sees it."""
    from suite.config.sweep_files import load_sweep

    if tasks is None:
        return load_sweep(found, overrides), None
    relative = inside(folder, tasks, option="--tasks")
    with search_first(tasks):
        return load_sweep(found, overrides), relative


def _without_password(optuna: str | None) -> str | None:
    """The address of Optuna's store, or None with a word of warning if it holds a password."""
    if optuna is None or not has_password(optuna):
        return optuna
    put(
        f"{OPTUNA} holds a password, which a job's command line would show to everybody; "
        f"only the {OPTUNA} of the head counts",
        err=True,
    )
    return None


def _command(asked: Asked, optuna: str | None, *, retry_given_up: bool) -> str:
    # exec: signals that Ray sends to the job must reach the driver, not a shell around it.
    command = f"exec {asked.command}"
    if optuna is not None:
        command += f" {shlex.join(['--optuna', optuna])}"
    if retry_given_up:
        command += " --retry-given-up"
    return command


def cluster_home(home: Path | None, storage: str | None) -> Path:
    """The home of a sweep on a cluster, as it was given.

    Raises:
        ConfigError: There is none, or it or the storage is a relative path: then it would lie in
            the job's own folder, which Ray removes.
    """
    from suite.storage.urls import is_local

    if storage is not None and is_local(storage) and not storage.startswith(("/", "file://")):
        raise ConfigError(
            f"--storage: got {storage}, expected s3://BUCKET/PREFIX, or the absolute path of a "
            "folder that every node of the cluster sees"
        )
    # With a storage a home on the node is enough, as it can be filled again.
    if home is None and storage is not None:
        # A home is the cache of one storage; another one's trials would count as its own.
        return Path(f"{LOCAL_HOMES}-{short_hash(storage)}")
    if home is None or not home.is_absolute():
        given = "none" if home is None else str(home)
        raise ConfigError(
            f"--home: got {given}, expected an absolute path that every node of the cluster sees, "
            "or give --storage s3://..."
        )
    return home


def _check_stores(
    home: Path, tracking_uri: str | None, optuna: str | None, storage: str | None
) -> None:
    """Refuse what the job would refuse or lose, as far as that can be told from here.

    What this machine cannot know is left to the job: what the disks there are, and whether a server
    answers.

    Raises:
        ConfigError: An sqlite file has a relative path: it would lie in the job's own folder.
        TrackingError: A store is of a kind that nobody knows.
        StorageError: The same of the storage.
    """
    from suite.record.folder import Home
    from suite.storage.urls import split_url
    from suite.tracking.store import resolve_uri

    for option, uri in (("--tracking-uri", tracking_uri), ("--optuna", optuna)):
        # A path begins after three slashes, so the fourth one makes it absolute.
        if uri is not None and re.match(r"sqlite[\w+]*:(?!////)", uri):
            raise ConfigError(
                f"{option}: got {uri}, expected a server, or the absolute path of a file on the "
                "head's own disk: sqlite:////PATH.db"
            )
    if tracking_uri is not None:
        resolve_uri(Home(home), tracking_uri)
    if optuna is not None:
        # Imports Optuna, which takes a second.
        from suite.tracking.optuna_mirror import check_url

        check_url(optuna)
    if storage is not None:
        split_url(storage)


def inside(folder: Path, path: Path, *, option: str) -> Path:
    """The path as it is seen from the working folder.

    Raises:
        ConfigError: The path lies elsewhere, and would not be on the cluster.
    """
    resolved = path.resolve()
    if not resolved.is_relative_to(folder):
        raise ConfigError(
            f"{option} {path}: is not below --working-dir {folder}, which is all that the cluster "
            "gets; move it there"
        )
    return resolved.relative_to(folder)


def show_jobs(address: str, *, sweep: str | None, fmt: Format) -> None:
    """Every job of a cluster that runs, or ran, a sweep."""
    from suite.cluster.jobs import JobClient

    cluster = JobClient(address)
    rows = []
    for job in cluster.jobs():
        if sweep in (None, job.sweep):
            rows.append(_row(cluster, job))
    columns = [
        column("job"),
        column("sweep"),
        column("home"),
        column("state"),
        Column("done", _progress, right=True),
        Column("running for", lambda row: render.duration(row["seconds"])),
    ]
    render.render(rows, columns, fmt, title=f"sweeps on {cluster.address}", keys=tuple(_KEYS))


_KEYS = (
    "job",
    "sweep",
    "home",
    "state",
    "done",
    "total",
    "started_at",
    "ended_at",
    "seconds",
    "exit_code",
    "message",
)


def _row(cluster: JobClient, job: Job) -> dict[str, Any]:
    # A job that has just begun has printed no progress.
    done = None
    total = None
    progress = cluster.progress(job.id)
    if progress is not None:
        done, total = progress
    end_s = job.ended_s
    if end_s is None and job.is_live:
        # Ray gives the start by the wall clock, so the end must come from it too.
        end_s = time.time()
    seconds = None
    if job.started_s is not None and end_s is not None:
        # The clocks of two machines differ: a job may seem to end before it began.
        seconds = max(0.0, end_s - job.started_s)
    return {
        "job": job.id,
        "sweep": job.sweep,
        "home": job.home,
        "state": job.status.lower(),
        "done": done,
        "total": total,
        "started_at": job.started_s,
        "ended_at": job.ended_s,
        "seconds": seconds,
        "exit_code": job.exit_code,
        "message": job.message.partition("\n")[0],
    }


def _progress(row: Mapping[str, Any]) -> str:
    if row["done"] is None:
        return render.MISSING
    return f"{row['done']}/{row['total']}"


def _follow(cluster: JobClient, job: Job, sweep: str, *, attached: bool) -> None:
    """Print what the driver prints; exit with its code."""
    try:
        ended = cluster.follow(job.id, _write, attached=attached)
    except KeyboardInterrupt:
        # Ctrl-C here must not cost days of work on the cluster.
        put("\nno longer followed; the sweep runs on", err=True)
        _say_how_to_go_on(cluster, job, sweep)
        raise typer.Exit(STOPPED) from None
    # A job that Ray could not start has no exit code: that counts as 1.
    code = EXIT_CODES.get(ended.status, ended.exit_code or 1)
    if code == 127:  # a shell's code for a command that it does not find
        put(
            "the head has no command `suite`: install the project on every node (docs/cluster.md)",
            err=True,
        )
    if code:
        reason = f"exit code {ended.exit_code}"
        if ended.exit_code is None:
            reason = ended.message.partition("\n")[0]
        put(
            f"job {job.id}: {ended.status.lower()}, {reason}; submit it again to go on",
            err=True,
        )
        raise typer.Exit(code)


def _write(text: str) -> None:
    sys.stdout.write(text)
    # At once: a person watches, and a pipe would hold pages back.
    sys.stdout.flush()


def _say_how_to_go_on(cluster: JobClient, job: Job, sweep: str) -> None:
    here = shlex.join(["--address", cluster.address])
    put("follow it: the same command again", err=True)
    put(f"all jobs:  suite status {here}", err=True)
    put(f"end it:    {how_to_stop(cluster.address, job, sweep)}", err=True)


def how_to_stop(address: str, job: Job, sweep: str) -> str:
    """The command that ends this job and no other of the same sweep, quoted for a shell."""
    # The command line of a job of one's own may name no home.
    if job.home is None:
        return shlex.join(["ray", "job", "stop", job.id, "--address", address])
    option = "--storage" if "://" in job.home else "--home"
    return shlex.join(["suite", "stop", job.sweep or sweep, "--address", address, option, job.home])


def _required(address: str | None) -> str:
    if address is None:
        raise ConfigError(
            "--address: got none, expected the dashboard of a Ray cluster, http://HEAD:8265 "
            "(here: suite run SWEEP)"
        )
    return address


def _sweep_there(found: Path, folder: Path) -> str:
    """How the cluster finds the sweep: by its path in the working folder, or by a shipped name."""
    from suite.registry import shipped_folder

    path = found.resolve()
    is_shipped = path.is_relative_to(shipped_folder("sweeps").resolve())
    # In a checkout the shipped folder may lie in the working folder, whose files are uploaded.
    if is_shipped and not path.is_relative_to(folder):
        # The cluster has the package, and with it the sweeps that it ships.
        return found.stem
    return str(inside(folder, found, option="SWEEP"))


def _variables(folder: Path) -> dict[str, str]:
    """Variables for the job: folders of plug-ins and tasks in the working folder, and the width."""
    # The driver has no terminal there; its tables get the width of the one here.
    variables = {"COLUMNS": str(shutil.get_terminal_size((120, 24)).columns)}
    for name in ("SUITE_PATH", TASK_FOLDERS):
        relative = []
        for root in os.environ.get(name, "").split(os.pathsep):
            if root:
                relative.append(str(inside(folder, Path(root), option=name)))
        if relative:
            variables[name] = os.pathsep.join(relative)
    return variables
