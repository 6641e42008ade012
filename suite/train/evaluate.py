"""Predictions and scores of a split, on all ranks together."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset

from suite.config.task import TaskConfig
from suite.data.objective import Objective
from suite.meters import PhaseMeter
from suite.metrics.quality import headline, score
from suite.train.batches import eval_batches
from suite.train.engine import Engine, gather_objects


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Per-item predictions of a split and what they score (0 to 100)."""

    index: list[str]
    gold: list[float]
    prediction: list[float]
    scores: dict[str, float]
    score: float

    def to_parquet(self) -> bytes:
        """One row per item: `index`, `gold`, `prediction`; the input of paired tests."""
        buffer = io.BytesIO()
        table = pa.table({"index": self.index, "gold": self.gold, "prediction": self.prediction})
        pq.write_table(table, buffer)
        return buffer.getvalue()


def evaluate(
    engine: Engine, objective: Objective, data: Dataset, task: TaskConfig, meter: PhaseMeter, *, rank: int, world_size: int, batch_size: int
) -> Evaluation:
    """Predict every row of `data` once. Collective: every rank runs the same number of batches."""
    model, mine = engine.module, {}
    model.eval()
    synced = world_size > 1 and engine.training.zero_stage == 3
    with torch.no_grad():
        for batch, rows in eval_batches(data, objective.collate, batch_size=batch_size, rank=rank, world_size=world_size):
            inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            with meter.probe(inputs["input_ids"].numel()):
                predictions = objective.predict(model, inputs, synced=synced)
            mine.update({row: float(p) for row, p in zip(rows, predictions, strict=True) if row is not None})
    merged = {row: p for part in gather_objects(mine) for row, p in part.items()}
    prediction, gold = [merged[row] for row in range(len(data))], [float(g) for g in data["gold"]]
    scores = score(task.metrics, prediction, gold)
    return Evaluation([str(i) for i in data["index"]], gold, prediction, scores, headline(scores, task.metrics))
