"""`suite run`: a whole sweep, from its file to its leaderboard."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import leaderboard, render
from suite.cli.options import DEFAULT_HOME, DataRootOption, Format, FormatOption, HomeOption, SetOption, TrackingOption
from suite.errors import UnknownNameError

if TYPE_CHECKING:
    from suite.config.sweep import SweepConfig
    from suite.tune.events import Outcome


def run(
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep file, or the name of a known one (suite list sweeps).")],
    home: HomeOption = DEFAULT_HOME,
    data_root: DataRootOption = None,
    address: Annotated[str | None, typer.Option(metavar="ADDR", help="A running Ray cluster, or auto.  [default: this machine]")] = None,
    tracking_uri: TrackingOption = None,
    overrides: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print cells, resources and cost; start nothing.")] = False,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Run a sweep, or go on with it: what has finished is never run again. Prints the leaderboard."""
    from suite.config.sweep import load_sweep

    path = find_sweep(sweep)
    config = load_sweep(path, overrides or ())
    if dry_run:
        from suite.cli.estimate import show_plan

        return show_plan(config, where=str(path), home=home, address=address, fmt=fmt)
    options = {
        "--home": home if home != DEFAULT_HOME else None,
        "--data-root": data_root,
        "--address": address,
        "--tracking-uri": tracking_uri,
    }
    command = ["suite", "run", sweep, *(text for key, value in options.items() if value for text in (key, str(value)))]
    command += [text for item in overrides or () for text in ("--set", item)]
    outcome = _run(config, where=str(path), home=home, data_root=data_root, address=address, tracking_uri=tracking_uri, command=command)
    _finish(config, outcome, home=home, tracking_uri=tracking_uri, command=command, fmt=fmt)


def find_sweep(given: str) -> Path:
    """The file of a path, or of a name that `suite list sweeps` knows.

    Raises:
        UnknownNameError: Neither.
    """
    from suite.registry import yaml_names

    known = yaml_names("sweeps")
    path = Path(given)
    if path.is_file():
        return path
    if given in known:
        return known[given]
    raise UnknownNameError("sweep", given, [*known, *(str(p) for p in path.parent.glob("*.yaml"))], where="SWEEP (a file or a known name)")


def _run(
    config: SweepConfig,
    *,
    where: str,
    home: Path,
    data_root: Path | None,
    address: str | None,
    tracking_uri: str | None,
    command: list[str],
) -> Outcome:
    """The sweep, with the live table and MLflow listening."""
    from suite.cli.live import board
    from suite.tracking.store import resolve_uri
    from suite.tracking.writer import TrackingListener
    from suite.train.folder import Home
    from suite.tune.driver import run_sweep

    place = Home(home)
    tracking = TrackingListener(place, resolve_uri(place, tracking_uri), sweep=config.name)
    try:
        with render.stdout_for_result(), board() as shown:
            listeners: list[Any] = [shown, tracking]  # the tracking package stands beside tune and does not import its Listener
            return run_sweep(config, home=place, data_root=data_root, address=address, listeners=listeners, where=where)
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: {shlex.join(command)}", file=sys.stderr)
        raise typer.Exit(130) from None


def _finish(config: SweepConfig, outcome: Outcome, *, home: Path, tracking_uri: str | None, command: list[str], fmt: Format) -> None:
    """Print the leaderboard, what went wrong and what to type next; leave with 1 if any cell has no result."""
    from suite.errors import TrackingError
    from suite.tracking.store import resolve_uri
    from suite.train.folder import Home

    if any(cell.done for cell in outcome.cells):
        try:
            leaderboard.show(resolve_uri(Home(home), tracking_uri), sweep=config.name, fmt=fmt)
        except TrackingError as error:
            print(f"no leaderboard: {error}", file=sys.stderr)
    where = "" if home == DEFAULT_HOME else f" --home {shlex.quote(str(home))}"
    if outcome.interrupted:
        print(f"stopped ({outcome.reason}); nothing that finished is lost. Go on with: {shlex.join(command)}", file=sys.stderr)
        raise typer.Exit(130 if "ctrl-c" in outcome.reason.lower() else 1)
    if outcome.failed:
        print(
            f"{len(outcome.failed)} cells ended without a result; causes and logs: suite status{where} --sweep {config.name}",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    hints = (
        (f"suite leaderboard{where} --sweep {config.name} --sort energy", "the same by cost; also memory, trainable"),
        ("suite list tasks", "what else there is; also methods, backbones, sweeps"),
        ("suite run my-sweep.yaml --dry-run", "a sweep of your own; docs/quickstart.md shows how"),
    )
    width = max(len(hint) for hint, _ in hints)
    print("\nnext:\n" + "\n".join(f"  {hint:<{width}}  {what}" for hint, what in hints), file=sys.stderr)
