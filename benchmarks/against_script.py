"""A search of learning rates by the suite, and by the script that one would write for it.

    python benchmarks/against_script.py --data-root DATA [--methods full,lora,read] [--trials 8]

The work is the same on all sides: MiniLM on SST-2, so many trials of two epochs, validated after
each, batches of 32, both cores. The sides run in turns, each in processes of its own:

script: Hugging Face's Trainer with PEFT inside an Optuna study, with their defaults. PEFT has no
    READ, so there the script trains the suite's module.
Ray Train: a `TorchTrainer` of two workers for each trial, with the loop of Ray's own guide.
suite: `run_sweep` as its users call it, with ZeRO-3 and with its records and checkpoints.
suite-auto: The same with `training.zero_stage: auto`, which partitions nothing where all fits.

Seconds per trial are the wall time from the start of the process to the end of the last search
trial, over the number of trials; "start" is the part before the first trial begins.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
EPOCHS, BATCH, EVAL_BATCH = 2, 32, 96
RATES = {"full": (1e-5, 1e-3), "lora": (1e-4, 1e-2), "read": (1e-4, 1e-1)}


@dataclass(frozen=True)
class Work:
    """What a side has to do.

    Attributes:
        train, validation: Rows.
        trials: Learning rates to try.
    """

    method: str
    data_root: str
    train: int
    validation: int
    trials: int


@dataclass(frozen=True)
class Done:
    """What a side took: seconds until the first trial and until the end of the last one."""

    start_s: float
    wall_s: float
    trials: int
    best: float

    @property
    def trial_s(self) -> float:
        return self.wall_s / self.trials


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--methods", default="full,lora,read")
    parser.add_argument("--sides", default="script,suite,ray-train")
    parser.add_argument("--train", type=int, default=512, help="training rows")
    parser.add_argument("--validation", type=int, default=256, help="validation rows")
    parser.add_argument("--trials", type=int, default=8, help="of full and LoRA; READ has 16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(asdict(SIDES[given.side](Work(**json.loads(given.work))))))
        return
    print("| method | side | trials | start, s | seconds per trial | of the script's | best |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for method in given.methods.split(","):
        trials = 16 if method == "read" else given.trials
        data_root = str(Path(given.data_root).resolve())
        work = Work(method, data_root, given.train, given.validation, trials)
        show(work, measured(work, given.sides.split(","), given.rounds))


def measured(work: Work, sides: list[str], rounds: int) -> dict[str, list[Done]]:
    """The sides in turns, each in a process of its own."""
    found: dict[str, list[Done]] = {side: [] for side in sides}
    for round_ in range(rounds):
        # Whoever comes second finds a warmer file cache.
        for side in sides if round_ % 2 == 0 else reversed(sides):
            given = work
            if side == "ray-train":
                given = Work(**{**asdict(work), "trials": 2})
            command = [sys.executable, __file__, "--data-root", work.data_root, "--side", side]
            began = time.time()
            printed = subprocess.run(
                [*command, "--work", json.dumps(asdict(given))],
                cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
            ).stdout  # fmt: skip
            # The sides give times of the day, of which this process knows the beginning.
            done = Done(**json.loads(printed.strip().splitlines()[-1]))
            since = {"start_s": done.start_s - began, "wall_s": done.wall_s - began}
            found[side].append(Done(**{**asdict(done), **since}))
    return found


def show(work: Work, found: Mapping[str, list[Done]]) -> None:
    script = median(done.trial_s for done in found["script"]) if "script" in found else None
    for side, runs in found.items():
        trial_s = median(done.trial_s for done in runs)
        spread = ""
        if len(runs) > 1:
            spread = f" ({min(d.trial_s for d in runs):.1f} to {max(d.trial_s for d in runs):.1f})"
        ratio = "-" if script is None else f"{trial_s / script:.2f}"
        start_s = median(done.start_s for done in runs)
        print(
            f"| {work.method} | {side} | {runs[0].trials} | {start_s:.1f} | {trial_s:.1f}{spread}"
            f" | {ratio} | {runs[0].best:.1f} |",
            flush=True,
        )


# ---- the suite -----------------------------------------------------------------------------------


def suite_side(work: Work, *, zero_stage: int | str = 3) -> Done:
    from suite.config.sweep import SweepConfig
    from suite.record.cells import read_cells
    from suite.record.folder import Home
    from suite.tune.driver import run_sweep

    low, high = RATES[work.method]
    config = SweepConfig.model_validate(
        {
            "name": "against",
            "backbones": ["minilm"],
            "methods": [{"name": work.method, "learning_rate": {"low": low, "high": high}}],
            "tasks": ["sst2"],
            "architectures": "first",
            "search": {"trials": work.trials, "edge_guard": {"extensions": 0}, "stop": None},
            "confirm": {"seeds": [1]},
            "limit": {"train": work.train, "validation": work.validation, "test": 64},
            "training": {
                "epochs": EPOCHS,
                "batch_size": BATCH,
                "eval_batch_size": EVAL_BATCH,
                "max_length": 128,
                "patience": None,
                "zero_stage": zero_stage,
            },
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        outcome = run_sweep(config, home=home, data_root=Path(work.data_root))
        assert outcome.ok, outcome
        (cell,) = read_cells(home, config.name).values()
        results = [trial.result for trial in cell.search if trial.result is not None]
    best = max(result.score for result in results if result.score is not None)
    began = min(result.started_at for result in results)
    ended = max(result.finished_at for result in results)
    return Done(began, ended, len(results), best)


# ---- the script ----------------------------------------------------------------------------------


def script_side(work: Work) -> Done:
    import optuna
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    tokenizer, train, validation = rows_of(work)
    low, high = RATES[work.method]
    started = time.time()

    def trial_of(trial: optuna.Trial) -> float:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                learning_rate=trial.suggest_float("learning_rate", low, high, log=True),
                num_train_epochs=EPOCHS,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=EVAL_BATCH,
                eval_strategy="epoch",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            trainer = Trainer(
                model=model_of(work.method),
                args=arguments,
                train_dataset=train,
                eval_dataset=validation,
                data_collator=DataCollatorWithPadding(tokenizer),
                compute_metrics=accuracy,
            )
            trainer.train()
            return max(
                float(line["eval_accuracy"])
                for line in trainer.state.log_history
                if "eval_accuracy" in line
            )

    study = optuna.create_study(direction="maximize")
    study.optimize(trial_of, n_trials=work.trials)
    return Done(started, time.time(), work.trials, study.best_value)


def accuracy(prediction: Any) -> dict[str, float]:
    hits = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": 100.0 * float(hits.mean())}


def rows_of(work: Work) -> tuple[Any, Any, Any]:
    """The tokenizer, and the tokenised rows of both splits."""
    from datasets import Dataset, load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    folder = Path(work.data_root) / "nyu-mll" / "glue" / "sst2"
    files = {}
    for split in ("train", "validation"):
        files[split] = [str(path) for path in sorted(folder.glob(f"{split}*.parquet"))]
    data = load_dataset("parquet", data_files=files)

    def tokenised(split: str, rows: int) -> Dataset:
        some = data[split].shuffle(seed=0).select(range(rows))
        some = some.map(
            lambda batch: tokenizer(batch["sentence"], truncation=True, max_length=128),
            batched=True,
        )
        return some.remove_columns(["sentence", "idx"]).rename_column("label", "labels")

    return tokenizer, tokenised("train", work.train), tokenised("validation", work.validation)


def checkpoint() -> str:
    """The folder of MiniLM's weights, which a package ships."""
    from suite.backbones.loading import resolve
    from suite.config.sweep import BackboneChoice

    return resolve(BackboneChoice(name="minilm")).path


def model_of(method: str) -> Any:
    from suite.petl.arm import full_architecture

    if method in ("full", "lora"):
        from benchmarks import plain

        return plain.make_model(
            checkpoint(), method, num_labels=2, lora=full_architecture("lora", {})
        )
    from suite.backbones.loading import Head, resolve
    from suite.config.arm import Arm
    from suite.config.sweep import BackboneChoice
    from suite.petl.arm import build_arm

    choice = BackboneChoice(name="minilm")
    arm = Arm(backbone=choice, method=method, architecture=full_architecture(method, {}))
    model, _ = build_arm(resolve(choice), Head("classification", 2), arm)
    return model


# ---- Ray Train -----------------------------------------------------------------------------------


def ray_train_side(work: Work) -> Done:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    low, high = RATES[work.method]
    runtime_env = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=runtime_env)
    started = time.time()
    best = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(work.trials):
            rate = low * (high / low) ** ((number + 0.5) / work.trials)
            mark = Path(folder) / f"{number}.txt"
            TorchTrainer(
                train_with_ray_train,
                train_loop_config={
                    "work": asdict(work),
                    "learning_rate": rate,
                    "mark": str(mark),
                },
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                run_config=RunConfig(name=str(number), storage_path=folder),
            ).fit()
            best = max(best, float(mark.read_text()))
    ended = time.time()
    ray.shutdown()
    return Done(started, ended, work.trials, best)


def train_with_ray_train(config: dict[str, Any]) -> None:
    """The loop of one rank, as in Ray's guide to PyTorch."""
    import ray.train
    import ray.train.torch
    import torch
    from torch.utils.data import DataLoader
    from transformers import DataCollatorWithPadding

    work = Work(**config["work"])
    tokenizer, train, validation = rows_of(work)
    collate = DataCollatorWithPadding(tokenizer)
    model = ray.train.torch.prepare_model(model_of(work.method))
    loader = DataLoader(train, batch_size=BATCH // 2, shuffle=True, collate_fn=collate)
    loader = ray.train.torch.prepare_data_loader(loader)
    scored = DataLoader(validation, batch_size=EVAL_BATCH, collate_fn=collate)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config["learning_rate"])
    best = 0.0
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        model.eval()
        hits = []
        with torch.no_grad():
            for batch in scored:
                hits.append((model(**batch).logits.argmax(-1) == batch["labels"]).float())
        best = max(best, 100.0 * float(torch.cat(hits).mean()))
        ray.train.report({"accuracy": best})
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["mark"]).write_text(str(best))


SIDES: dict[str, Callable[[Work], Done]] = {
    "script": script_side,
    "suite": suite_side,
    "suite-auto": partial(suite_side, zero_stage="auto"),
    "ray-train": ray_train_side,
}


if __name__ == "__main__":
    main()
