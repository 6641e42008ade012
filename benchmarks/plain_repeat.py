"""Finished cells of a home beside a plain PyTorch (+ PEFT) script: the same rows, splits, seeds, learning rates and batch sizes.

    python -m benchmarks.plain_repeat --home HOME --data-root DATA [--sweep NAME] [full/sst2 lora/sst2 bitfit/sst2]

The suite only says which trials there were and gives the tokenised rows; `benchmarks/plain.py` trains and scores by itself, in the
trials' precision, in one process, in random orders of its own. A cell is repeated where the script's mean over the seeds lies in the cell's 95% interval.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plain
from benchmarks.sst2_parity import mean_std, plain_of
from suite.leaderboard.select import find_cell
from suite.record.cells import Trial
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.stats.answers import read_answers
from suite.stats.interval import cell_interval
from suite.storage.workspace import Workspace

CELLS = ("full/sst2", "lora/sst2", "bitfit/sst2")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", default=CELLS, help="ARM/TASK, as for suite compare")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--sweep", help="needed where several sweeps of the home have the cell")
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args()
    print(
        "| cell | learning rate | batch | seeds | suite | 95% interval | script | script - suite |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    outside = []
    # The tokenised rows lie in a folder of their own: nothing is written into a finished home.
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Home(Path(folder)), data_root=options.data_root)
        for name in options.cells:
            cell = find_cell(Home(options.home), name, sweep=options.sweep)
            if not repeated(name, cell.confirmed(), workspace):
                outside.append(name)
    if outside:
        raise SystemExit(f"outside of the cell's interval: {', '.join(outside)}")


def repeated(name: str, confirmed: Sequence[Trial], workspace: Workspace) -> bool:
    """Train every confirm run of a cell again, print both sides, and say whether they agree."""
    specs = [trial.spec for trial in confirmed]
    # All of them first: a cell that cannot be repeated should not cost an hour before it says so.
    for spec in specs:
        check(name, spec)
    answers = read_answers(confirmed)
    interval = cell_interval(answers)
    ours = list(answers.scores.values())
    precisions = {trial.result.precision for trial in confirmed if trial.result is not None}
    if precisions not in ({"fp32"}, {"bf16-autocast"}):
        raise SystemExit(
            f"{name}: its trials were computed in {', '.join(sorted(map(str, precisions)))},"
            " expected fp32 alone or bf16-autocast alone, which is what the script can do"
        )
    bf16 = precisions == {"bf16-autocast"}
    peers = [plain_of(spec, workspace, bf16=bf16) for spec in specs]
    apart = statistics.mean(peers) - statistics.mean(ours)
    print(
        f"| {name} | {specs[0].learning_rate:.3g} | {specs[0].training.batch_size} | {len(specs)}"
        f" | {mean_std(ours)} | {interval.low:.1f} to {interval.high:.1f}"
        f" | {mean_std(peers)} | {apart:+.2f} |",
        flush=True,
    )
    # The interval is over seeds and items; both sides share the items, so the seeds alone may part them.
    return interval.low <= statistics.mean(peers) <= interval.high


def check(name: str, spec: TrialSpec) -> None:
    """Refuse a trial that the script would train in another way."""
    training = spec.training
    # What `benchmarks/plain.py` has built in; the batch size, rate, clipping and LoRA's rank are given to it.
    wanted = {
        "attention": (spec.arm.attention.name, "pretrained"),
        "training.schedule": (training.schedule, "linear"),
        "training.warmup_frac": (training.warmup_frac, plain.WARMUP_FRAC),
        "training.weight_decay": (training.weight_decay, 0.0),
        "training.patience": (training.patience, None),
    }
    if spec.arm.method == "lora":
        wanted["architecture.targets"] = (spec.arm.architecture["targets"], ["q", "v"])
    elif spec.arm.method == "bitfit":
        # The script trains every bias that there is.
        sites = ["attention", "feed-forward", "norm", "head"]
        wanted["architecture.sites"] = (spec.arm.architecture["sites"], sites)
    elif spec.arm.method != "full":
        wanted["method"] = (spec.arm.method, "full, bitfit or lora")
    for key, (got, expected) in wanted.items():
        if got != expected:
            raise SystemExit(f"{name}: {key} is {got!r}, but the script has {expected!r}")


if __name__ == "__main__":
    main()
