"""How long commands take that train nothing, from the start of the process to its end.

    python benchmarks/startup.py [--repeats 5] [--before CHECKOUT] [--quick]

Every command runs in a process of its own, `--repeats` times, in turns with the others: a table of
medians and ranges in seconds. In the same turns run the two things that nobody can be faster than:
Python with nothing to do, and `import torch`. `--before` names a second checkout, whose commands
run in the same turns, one of the two first and then the other. Each gets a home with an
ended sweep, which its own code makes.

`--dry-run` and `init` are measured twice: with an empty folder of kept plans, where they build
every arm, and after a dry run of the same sweep. `--quick` leaves out what builds arms: first dry
runs, `init` and `params`.
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKE_HOME = """
import sys
from pathlib import Path
from suite.tracking import sync
from tests.records import make_home

home = make_home(Path(sys.argv[1]))
assert sync(home, tracking_uri=home.tracking_uri).unreachable is None
"""
HOME = "HOME"
"""Stands in a command for the home of its checkout."""
KINDS = ("methods", "attention", "tasks", "backbones", "search-spaces", "sweeps")


@dataclass(slots=True)
class Command:
    """What is measured, and what was measured so far.

    Attributes:
        title: Its name in the table.
        arguments: What follows `python`.
        is_first: Whether it finds no kept plans.
        builds: Whether it builds arms, here or in another checkout, and so takes long.
        seconds: Wall time of every run, by checkout.
    """

    title: str
    arguments: Sequence[str]
    is_first: bool = False
    builds: bool = False
    seconds: dict[Path, list[float]] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout, for the first column")
    parser.add_argument("--quick", action="store_true", help="leave out what builds arms")
    options = parser.parse_args()
    checkouts = [ROOT]
    if options.before is not None:
        checkouts.insert(0, options.before.resolve())
    for checkout in checkouts:
        # Nobody's first run is to pay for the bytecode of all others.
        compileall.compile_dir(checkout / "suite", quiet=2)
    with tempfile.TemporaryDirectory() as folder:
        for checkout in checkouts:
            # Another version of the suite does not read this one's records.
            make = ("-c", MAKE_HOME, HOME)
            run(Command("a home", make), checkout, Path(folder))
        commands = what_is_measured(Path(folder))
        if options.quick:
            commands = [command for command in commands if not command.builds]
        for number in range(options.repeats):
            for command in commands:
                # In turns, so that a machine that slows down slows both sides.
                for checkout in checkouts[:: (-1) ** number]:
                    took_s = run(command, checkout, Path(folder))
                    command.seconds.setdefault(checkout, []).append(took_s)
    show(commands, checkouts)


def what_is_measured(folder: Path) -> list[Command]:
    commands = [
        Command("python -c pass", ("-c", "pass")),
        Command('python -c "import torch"', ("-c", "import torch")),
    ]
    for kind in KINDS:
        commands.append(of_suite(f"list {kind}"))
    for name in ("status", "leaderboard"):
        commands.append(of_suite(name, "--home", HOME))
    dry_run = ("--dry-run", "--home", str(folder / "none"))
    first = of_suite("run quickstart", *dry_run, title="--dry-run, first", is_first=True)
    first.builds = True
    commands.append(first)
    commands.append(of_suite("run quickstart", *dry_run, title="--dry-run, again"))
    sweep = str(folder / "my-sweep.yaml")
    init = (sweep, "--yes", "--force")
    for command in (
        of_suite("init", *init, title="--yes, first", is_first=True),
        of_suite("init", *init, title="--yes, again"),
        of_suite("params --backbone minilm --method lora"),
    ):
        command.builds = True
        commands.append(command)
    return commands


def of_suite(words: str, *more: str, title: str = "", is_first: bool = False) -> Command:
    named = f"suite {words} {title}".strip()
    return Command(named, ("-m", "suite", *words.split(), *more), is_first)


def run(command: Command, checkout: Path, folder: Path) -> float:
    """Seconds of one run of a command with the code of a checkout."""
    home = str(folder / f"home-{checkout.name}")
    # Kept plans of its own for each checkout, and none for a first run.
    kept = folder / f"kept-{checkout.name}"
    if command.is_first:
        kept = Path(tempfile.mkdtemp(dir=folder))
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "XDG_CACHE_HOME": str(kept),
    }
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, *(home if word == HOME else word for word in command.arguments)],
        # Another folder than a checkout, which Python would put on the path first.
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began_s


def show(commands: Sequence[Command], checkouts: Sequence[Path]) -> None:
    heads = ["s"]
    if len(checkouts) > 1:
        heads = ["before, s", "after, s"]
    print(f"| command | {' | '.join(heads)} |")
    print(f"| --- | {' | '.join('--:' for _ in heads)} |")
    for command in commands:
        cells = []
        for checkout in checkouts:
            taken_s = command.seconds[checkout]
            middle_s = statistics.median(taken_s)
            cells.append(f"{middle_s:.2f} ({min(taken_s):.2f} - {max(taken_s):.2f})")
        print(f"| `{command.title}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
