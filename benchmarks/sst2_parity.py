"""Full fine-tuning and LoRA on SST-2: our sweep's test accuracy beside a plain PyTorch + PEFT loop.

Same rows, same split, same number of steps, same learning rate (the one the sweep's search chose), same seeds.

    python benchmarks/sst2_parity.py sweeps/minilm-glue-small.yaml --home runs --data-root DATA
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks import plain
from suite.backbones.loading import load_tokenizer, resolve
from suite.config.sweep import load_sweep
from suite.data.objective import make_objective
from suite.data.prepare import prepare
from suite.train.cells import Cell, read_cells
from suite.train.folder import Home

TOLERANCE_POINTS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--home", type=Path, default=Path("runs"))
    parser.add_argument("--data-root", type=Path, required=True)
    options = parser.parse_args()
    home = Home(options.home)
    cells = read_cells(home, load_sweep(options.sweep).name).values()
    print(f"{'method':8} {'lr':>9} {'suite':>14} {'plain':>14} {'difference':>10}")
    apart = [compare(cell, home, options.data_root) for cell in cells if cell.task == "sst2" and cell.arm.method in ("full", "lora")]
    if not apart or max(apart) > TOLERANCE_POINTS:
        raise SystemExit(f"differences {apart}: expected two of at most {TOLERANCE_POINTS} points")


def compare(cell: Cell, home: Home, data_root: Path) -> float:
    """Print one row; the difference of the mean test accuracies in points."""
    best = cell.best_search()
    assert best is not None, f"{cell.key}: no finished search trial"
    spec = best.spec
    ours = [t.result.test_score for t in cell.confirm if t.spec.learning_rate == spec.learning_rate and t.result is not None]
    resolved = resolve(spec.arm.backbone)
    objective = make_objective(
        spec.task, kind="encoder", tokenizer=load_tokenizer(resolved), training=spec.training, decoder_objective="head"
    )
    data = prepare(spec.task, objective, limit=spec.limit, data_root=data_root, cache=home.cache)
    splits = {name: data.split(name, confirm=True) for name in ("train", "validation", "test")}
    peers = [
        plain.train(
            splits,
            folder=resolved.path,
            method=cell.arm.method,
            lora=cell.arm.architecture,
            learning_rate=spec.learning_rate,
            epochs=spec.training.epochs,
            batch_size=spec.training.batch_size,
            seed=trial.spec.seed,
            clip=spec.training.gradient_clipping,
        ).test
        for trial in cell.confirm
        if trial.spec.learning_rate == spec.learning_rate
    ]
    difference = statistics.mean(ours) - statistics.mean(peers)
    print(f"{cell.arm.method:8} {spec.learning_rate:9.2e} {_mean_std(ours):>14} {_mean_std(peers):>14} {difference:+10.2f}", flush=True)
    return abs(difference)


def _mean_std(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


if __name__ == "__main__":
    main()
