"""What a trial costs beyond its training: our warm group against a Ray Train `TorchTrainer` per trial, on the same work.

    python benchmarks/trial_overhead.py [--trials 24] [--peer-trials 4]

Work of a trial: build a tiny random BERT, LoRA on it, ZeRO-3 on two gloo ranks, two epochs of a generated task with
validation. Overhead = wall clock per trial - seconds inside its train and eval loops. Both sides run in one Ray session.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from suite.config.hashing import short_hash
from suite.config.sweep import SweepConfig
from suite.record.cells import read_cells
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.tune.driver import run_sweep

BERT = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
WANTED_RATIO = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trials", type=int, default=24, help="of ours, the first with the start of the group"
    )
    parser.add_argument("--peer-trials", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
        try:
            ours, first_s, spec = warm_group(home, options.trials)
            peer = [
                torch_trainer(spec, home, Path(folder) / f"peer-{i}")
                for i in range(options.peer_trials)
            ]
        finally:
            ray.shutdown()
    mean_ours, mean_peer, median_warm = (
        statistics.mean(ours),
        statistics.mean(peer),
        statistics.median(ours[1:]),
    )
    print(
        f"warm group: {len(ours)} trials; first (starts the group) {first_s:.1f} s, then {median_warm:.2f} s median beyond training"
    )
    print(f"            mean over all {len(ours)}, start included: {mean_ours:.2f} s")
    print(
        f"TorchTrainer per trial: {len(peer)} trials; {mean_peer:.1f} s mean beyond training ({min(peer):.1f} to {max(peer):.1f})"
    )
    print(
        f"ratio: {mean_peer / mean_ours:.1f} with our start included, {mean_peer / median_warm:.1f} once warm"
    )
    if mean_peer / mean_ours < WANTED_RATIO:
        raise SystemExit(f"expected at least {WANTED_RATIO}")


def warm_group(home: Home, trials: int) -> tuple[list[float], float, TrialSpec]:
    """Seconds beyond training of each trial of a sweep of one cell, in the order they ran."""
    values: dict[str, Any] = {
        "name": "overhead",
        "backbones": [
            {
                "name": "bert-base",
                "config": BERT | {"max_position_embeddings": 128},
                "tokenizer": "bytes",
            }
        ],
        "methods": ["lora"],
        "tasks": ["entailment"],
        "search": {"trials": trials - 1, "sampler": "random"},
        "confirm": {"seeds": [1]},
        "limit": {"train": 128, "validation": 32, "test": 32},
        "training": {"epochs": 2, "patience": None, "batch_size": 16, "max_length": 128},
        "resources": {"workers": 2},
    }
    began = time.time()
    outcome = run_sweep(SweepConfig.model_validate(values), home=home)
    assert outcome.ok, outcome
    (cell,) = read_cells(home, "overhead").values()
    done = sorted(
        (t for t in (*cell.search, *cell.confirm) if t.result is not None),
        key=lambda t: t.result.finished_at,
    )
    overheads, previous = [], began
    for trial in done:
        trained = sum(
            record.seconds
            for name, record in trial.result.phases.items()
            if name in ("train", "eval", "test")
        )
        overheads.append(trial.result.finished_at - previous - trained)
        previous = trial.result.finished_at
    return overheads, overheads[0], cell.search[0].spec


def torch_trainer(spec: TrialSpec, home: Home, folder: Path) -> float:
    """Seconds beyond training of one trial as a Ray Train job of its own."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    marks = folder.with_suffix(".txt")
    config = {"spec": spec.model_dump_json(), "home": str(home.path), "marks": str(marks)}
    began = time.time()
    TorchTrainer(
        train_with_ray_train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(name=short_hash(str(folder)), storage_path=str(folder)),
    ).fit()
    return time.time() - began - float(marks.read_text())


def train_with_ray_train(config: dict[str, Any]) -> None:
    """The loop of one rank: the same model, data, steps and validation, on a DeepSpeed engine made for this trial."""
    import ray.train
    import torch

    from suite.backbones.loading import load_tokenizer, resolve
    from suite.data.make_objective import make_objective
    from suite.data.prepare import prepare
    from suite.meters import PhaseMeter
    from suite.petl.arm import build_arm
    from suite.train.batches import TrainBatches
    from suite.train.engine import Engine
    from suite.train.evaluate import evaluate
    from suite.train.process_group import adopt_process_group

    spec, home = TrialSpec.model_validate_json(config["spec"]), Home(Path(config["home"]))
    rank = ray.train.get_context().get_world_rank()
    adopt_process_group("gloo", timeout_s=600.0)
    resolved = resolve(spec.arm.backbone)
    objective = make_objective(
        spec.task,
        kind="encoder",
        tokenizer=load_tokenizer(resolved),
        training=spec.training,
        decoder_objective="head",
    )
    data = prepare(spec.task, objective, limit=spec.limit, data_root=None, cache=home.cache)
    arm = spec.arm
    model, _ = build_arm(
        resolved,
        objective.head,
        arm,
    )
    engine = Engine(model, spec.training, world_size=2, device="cpu")
    batches = TrainBatches(
        data.split("train", confirm=False),
        objective.collate,
        batch_size=16,
        micro_batch_size=8,
        rank=rank,
        world_size=2,
    )
    validation, meter = data.split("validation", confirm=False), PhaseMeter(torch.device("cpu"))
    trained_s = 0.0
    for epoch in range(spec.training.epochs):
        began = time.perf_counter()
        engine.module.train()
        for parts, _, _ in batches.epoch(epoch + 1, lambda number: number):
            engine.step(parts, spec.learning_rate)
        (evaluation,) = evaluate(
            [engine], objective, validation, meter, rank=rank, world_size=2, batch_size=96
        )
        trained_s += time.perf_counter() - began
        ray.train.report({"score": evaluation.score})
    if rank == 0:
        Path(config["marks"]).write_text(str(trained_s))


if __name__ == "__main__":
    main()
