"""`suite doctor`: what this machine or cluster can do and measure, with remedies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from suite.cli import render
from suite.cli.options import (
    AddressOption,
    Format,
    FormatOption,
    HomeOption,
    OptunaOption,
    StorageOption,
    TrackingOption,
)
from suite.cli.render import Row, column
from suite.config.names import DEFAULT_HOME
from suite.redact import redact

if TYPE_CHECKING:
    from suite.doctor import Finding

COLUMNS = [
    column("level", ""),
    column("check"),
    column("node", rank=1),
    column("found", wraps=True),
    column("remedy", wraps=True),
]


def doctor(
    address: AddressOption = None,
    home: HomeOption = DEFAULT_HOME,
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
    optuna: OptunaOption = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Show what this machine or cluster can do and measure: ok, warn or fail, and the remedy.

    The exit code is 1 if anything fails.
    """
    from suite.doctor.places import left_as_found
    from suite.storage.urls import is_local, open_storage

    home = home.resolve()
    folder = home
    if storage is not None and is_local(storage):
        # Workers of a running cluster have the working folder of `ray start`.
        storage = open_storage(storage).url
        folder = Path(storage)
    # Ray and torch print while they are probed; stdout is for the table alone.
    with render.stdout_for_result(), left_as_found(folder):
        found = list(findings(address, home, storage, tracking_uri, optuna))
    rows: list[Row] = []
    for finding in found:
        # Errors of MLflow and Optuna may quote a URL with its password.
        rows.append({key: redact(value) for key, value in asdict(finding).items()})
    counts = {"ok": 0, "warn": 0, "fail": 0}
    for row in rows:
        counts[row["level"]] += 1
    where = "this machine"
    if address is not None:
        where = f"cluster {address}"
    totals = ", ".join(f"{number} {level}" for level, number in counts.items())
    render.render(rows, COLUMNS, fmt, title=f"{where}: {totals}")
    # The table is out by then: a script reads the code, a person the table.
    if counts["fail"]:
        raise typer.Exit(1)


def findings(
    address: str | None,
    home: Path,
    storage: str | None,
    tracking_uri: str | None,
    optuna: str | None,
) -> Iterable[Finding]:
    """Findings of this machine; then, where Ray can be imported, of the cluster; then of stores."""
    # The checks import Ray, torch and MLflow; `--help` must not wait seconds for them.
    from suite.doctor import Level, run_checks
    from suite.doctor.install import install_checks
    from suite.doctor.machine import machine_checks
    from suite.doctor.mlflow import check_store
    from suite.doctor.places import home_writable
    from suite.doctor.places import storage as check_storage
    from suite.record.folder import Home
    from suite.tracking.store import resolve_uri

    installed = run_checks(install_checks())
    # First, because the installation decides which of the others can run at all.
    yield from installed
    # With --address the cluster's nodes are what counts, not the machine that asks.
    if address is None:
        yield from run_checks([*machine_checks(home), ("home", lambda: home_writable(home))])
    if storage is not None:
        yield from run_checks([("storage", lambda: check_storage(storage))])
    # Ray imports amdsmi where it finds it; with a broken one Ray cannot be imported.
    if not any(f.check in ("ray", "amdsmi") and f.level is Level.FAIL for f in installed):
        from suite.doctor.cluster import check_cluster

        yield from check_cluster(address, home=home, url=storage)
    yield from run_checks([("mlflow", lambda: check_store(resolve_uri(Home(home), tracking_uri)))])
    if optuna is not None:
        from suite.doctor.optuna import check_optuna

        yield from run_checks([("optuna", lambda: check_optuna(optuna))])
