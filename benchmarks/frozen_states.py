"""Seconds of a trial whose frozen stacks run in every step, and of one that reads what they gave.

    python benchmarks/frozen_states.py --data-root DATA [--methods read,lst] [--rows 512]

One process, ZeRO-3, MiniLM on SST-2, batch 32, two epochs. Trials with
`training.frozen_dropout` on and off alternate, each with a learning rate of its own. A trial's
seconds are those of its phases `train` and `eval`; what computes the states, once for all trials,
is in a column of its own. A ratio is taken within a round; the first round is left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice, LimitConfig
from suite.config.task import load_task
from suite.config.training import TrainingConfig
from suite.petl.arm import full_architecture
from suite.record.folder import Home
from suite.record.result import TrialResult
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.loop import Trainer
from suite.train.process_group import free_port
from suite.train.states_cache import STATES, states_folder

VALIDATION_ROWS = 128
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True, help="with SST-2")
    parser.add_argument("--methods", default="read,lst")
    parser.add_argument("--rows", type=int, default=512, help="training rows")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{given.rows} rows, {given.epochs} epochs, {torch.get_num_threads()} threads\n")
    print("| method | trial, on, s | trial, off, s | ratio (range) | states, once | kept, MiB |")
    print("|---|---|---|---|---|---|")
    for method in given.methods.split(","):
        with tempfile.TemporaryDirectory() as folder:
            home = Home(Path(folder))
            trainer = Trainer(Workspace(home, given.data_root), master_port=free_port())
            pairs = []
            for number in range(given.rounds + 1):
                on, off = (
                    train(trainer, spec_of(method, given.rows, given.epochs, number, dropout))
                    for dropout in (True, False)
                )
                pairs.append((on, off))
            trainer.close()
            show(method, pairs, home)


def spec_of(method: str, rows: int, epochs: int, number: int, dropout: bool) -> TrialSpec:
    # Fisher importances are prepared in a phase of their own, which neither side counts.
    architecture = {"init": "magnitude"} if method == "lst" else {}
    training = TrainingConfig(epochs=epochs, patience=None, batch_size=32, frozen_dropout=dropout)
    return TrialSpec(
        sweep="frozen-states",
        arm=Arm(
            backbone=BackboneChoice(name="minilm"),
            method=method,
            architecture=full_architecture(method, architecture),
        ),
        task=load_task("sst2"),
        training=training,
        limit=LimitConfig(train=rows, validation=VALIDATION_ROWS, test=40),
        number=number,
        learning_rate=1e-4 * (number + 1),
    )


def train(trainer: Trainer, spec: TrialSpec) -> TrialResult:
    trainer.start(spec)
    while not trainer.epoch().done:
        pass
    return trainer.finish()


def seconds(result: TrialResult) -> float:
    return result.phases["train"].seconds + result.phases["eval"].seconds


def show(method: str, pairs: list[tuple[TrialResult, TrialResult]], home: Home) -> None:
    made = pairs[0][1].frozen_states
    assert made is not None and made.cost is not None
    kept = sum(path.stat().st_size for path in states_folder(home.cache).glob(f"*/{STATES}"))
    timed = [(seconds(on), seconds(off)) for on, off in pairs[1:]]
    on_s = statistics.median(on for on, _ in timed)
    off_s = statistics.median(off for _, off in timed)
    ratios = [off / on for on, off in timed]
    print(
        f"| {method} | {on_s:.2f} | {off_s:.2f} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}) | {made.cost.seconds:.1f} | {kept / MIB:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
