"""Full fine-tuning and LoRA on SST-2: our trials (ZeRO-3, two ranks) beside a plain PyTorch + PEFT loop in one process.

Same rows in the same order, same split, same steps, same learning rate; each side draws its own head, LoRA matrices and dropout.

    python benchmarks/sst2_parity.py --data-root DATA [--train 640] [--epochs 2] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import plain
from suite.backbones.loading import load_tokenizer, resolve
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice, LimitConfig
from suite.config.task import load_task
from suite.config.training import TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.prepare import prepare
from suite.petl.arm import full_architecture
from suite.record.folder import Home
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.train.launch import train_trial

LEARNING_RATES = {"full": 3e-4, "lora": 3e-3}
TOLERANCE_POINTS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--train", type=int, default=640, help="training rows")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    print(
        f"{'method':8} {'lr':>8} {'suite':>14} {'plain':>14} {'difference':>10}   test accuracy, {len(options.seeds)} seeds"
    )
    apart = {}
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Home(Path(folder)), data_root=options.data_root)
        for method in LEARNING_RATES:
            specs = [spec_of(method, seed, options) for seed in options.seeds]
            ours = [ours_of(spec, workspace) for spec in specs]
            peers = [plain_of(spec, workspace) for spec in specs]
            apart[method] = statistics.mean(ours) - statistics.mean(peers)
            shown = f"{mean_std(ours):>14} {mean_std(peers):>14} {apart[method]:+10.2f}"
            print(f"{method:8} {LEARNING_RATES[method]:8.0e} {shown}", flush=True)
    if max(map(abs, apart.values())) > TOLERANCE_POINTS:
        raise SystemExit(f"expected differences of at most {TOLERANCE_POINTS} points")


def spec_of(method: str, seed: int, options: argparse.Namespace) -> TrialSpec:
    return TrialSpec(
        sweep="parity",
        arm=Arm(
            backbone=BackboneChoice(name="minilm"),
            method=method,
            architecture=full_architecture(method, {}),
        ),
        task=load_task("sst2"),
        training=TrainingConfig(
            epochs=options.epochs, batch_size=32, eval_batch_size=48, max_length=96, patience=None
        ),
        limit=LimitConfig(train=options.train),
        world_size=2,
        phase=Phase.CONFIRM,
        learning_rate=LEARNING_RATES[method],
        seed=seed,
    )


def ours_of(spec: TrialSpec, workspace: Workspace) -> float:
    score = train_trial(spec, workspace).test_score
    assert score is not None
    return score


def plain_of(spec: TrialSpec, workspace: Workspace, *, bf16: bool = False) -> float:
    resolved = resolve(spec.arm.backbone)
    objective = make_objective(
        spec.task,
        kind="encoder",
        tokenizer=load_tokenizer(resolved),
        training=spec.training,
        decoder_objective="head",
    )
    data = prepare(
        spec.task,
        objective,
        limit=spec.limit,
        data_root=workspace.data_root,
        cache=workspace.home.cache,
    )
    splits = {name: data.split(name, confirm=True) for name in ("train", "validation", "test")}
    epochs = range(1, spec.training.epochs + 1)
    orders = [
        np.random.default_rng(spec.stream("order", epoch))
        .permutation(len(splits["train"]))
        .tolist()
        for epoch in epochs
    ]
    run = plain.train(
        splits,
        folder=resolved.path,
        method=spec.arm.method,
        lora=spec.arm.architecture,
        learning_rate=spec.learning_rate,
        batch_size=spec.training.batch_size,
        seed=spec.seed,
        orders=orders,
        clip=spec.training.gradient_clipping,
        metrics=spec.task.metrics,
        bf16=bf16,
    )
    assert run.test is not None
    return run.test


def mean_std(values: list[float]) -> str:
    return (
        f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
        if len(values) > 1
        else f"{values[0]:.2f}"
    )


if __name__ == "__main__":
    main()
