"""Predict and score a split on all ranks together."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset

import suite.metrics.quality  # noqa: F401  (scikit-learn: before any clock of a trial starts)
from suite.data.objective import Batch, Objective
from suite.errors import gib
from suite.meters import PhaseMeter
from suite.petl._frozen import GivenPass
from suite.train.batches import eval_batches
from suite.train.engine import Engine
from suite.train.lanes import LanesMeter, side_by_side
from suite.train.process_group import all_agree, gather_objects


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Per-item predictions of a split and what they score.

    Attributes:
        index: Names of the items.
        gold: Classes, numbers, texts or lists of accepted texts; for running text, how many tokens
            of the item are scored.
        prediction: What the model answers; for running text, the negative log-likelihood of these
            tokens.
        group: What each item is a part of; None if the task has no groups.
        columns: Names of gold and prediction in the file.
        scores: Every metric of the task.
        score: The task's one number.
    """

    index: list[str]
    gold: list[Any]
    prediction: list[Any]
    group: list[str] | None
    columns: tuple[str, str]
    scores: dict[str, float]
    score: float

    def to_parquet(self) -> bytes:
        """One row per item: `index`, `gold`, `prediction` (running text: `tokens`, `nll`), `group`.

        Paired tests read these files.
        """
        gold_name, prediction_name = self.columns
        columns = {
            "index": self.index,
            gold_name: self.gold,
            prediction_name: self.prediction,
        }
        if self.group is not None:
            columns["group"] = self.group
        buffer = io.BytesIO()
        pq.write_table(pa.table(columns), buffer)
        return buffer.getvalue()


def evaluate(
    engines: Sequence[Engine],
    objective: Objective,
    data: Dataset,
    meter: PhaseMeter | LanesMeter,
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    given: Callable[[Sequence[int], Batch], GivenPass] | None = None,
) -> list[Evaluation]:
    """Predict every row of `data` once with the engine of each lane.

    Collective: every rank runs the same number of batches.

    Args:
        given: What the frozen stacks give for some rows and their batch; None = the stacks run.
    """
    models = [engine.module.eval() for engine in engines]
    device = engines[0].device
    # By lane, then by row.
    mine: list[dict[int, Any]] = [{} for _ in models]
    # Where every pass gathers weights, a rank must generate until the last one is done.
    synced = world_size > 1 and engines[0].gathers
    shortest = 0
    if given is not None:
        # The row that fills up the last batches (`eval_batches`).
        lengths = data["length"][:]
        shortest = min(range(len(data)), key=lengths.__getitem__)
    with torch.no_grad():
        for batch, rows in eval_batches(
            data, objective.collate_eval, batch_size=batch_size, rank=rank, world_size=world_size
        ):
            inputs = {name: tensor.to(device) for name, tensor in batch.items()}
            predict = partial(objective.predict, batch=inputs, synced=synced)
            with meter.probe(inputs["input_ids"].numel()):
                frozen: GivenPass | None = None
                if given is not None:
                    numbers = [shortest if row is None else row for row in rows]
                    frozen = given(numbers, batch)
                predictions = side_by_side(models, predict, frozen)
            for found, of_lane in zip(mine, predictions, strict=True):
                for row, prediction in zip(rows, of_lane, strict=True):
                    # Row None only fills up a batch.
                    if row is not None:
                        found[row] = prediction
    return [_scored(found, objective, data) for found in mine]


@contextmanager
def weights_at_hand(
    engines: Sequence[Engine],
    objective: Objective,
    *,
    usable_bytes: int | None,
    log: Callable[[str], None],
) -> Iterator[None]:
    """Gather all weights once for an evaluation that generates, where memory allows. Collective.

    Under ZeRO-3 each forward pass gathers weights, and a text takes a pass for each of its tokens.

    Args:
        engines: One for each lane.
        objective: What is evaluated.
        usable_bytes: As in `Workspace`.
        log: Receives a line that says whether they were gathered, and why.
    """
    if not objective.generates or not engines[0].gathers:
        yield
        return
    # Lanes share the frozen weights that are kept.
    needed = engines[0].kept_bytes() + sum(engine.whole_bytes() for engine in engines)
    fits = usable_bytes is not None and needed <= usable_bytes
    why = f"with all weights whole it holds {gib(needed)}"
    if usable_bytes is None:
        why += ", and how much it may is unknown"
    else:
        why += f", and may hold {gib(usable_bytes)}"
    with ExitStack() as stack:
        # The ranks' states differ by a few bytes of filling.
        if all_agree(fits):
            log(f"this rank gathers weights once for all texts: {why}")
            for engine in engines:
                stack.enter_context(engine.whole_weights())
        else:
            held = sum(stack.enter_context(engine.whole_peft_layers()) for engine in engines)
            if held:
                why += f"; {gib(held)} of layers of peft are gathered once in any case"
            log(f"this rank gathers weights for every token: {why}")
        yield


def _scored(mine: dict[int, Any], objective: Objective, data: Dataset) -> Evaluation:
    # Every rank gets all predictions: each computes the score, and decides by it alike.
    merged: dict[int, Any] = {}
    for part in gather_objects(mine):
        merged |= part
    # In the order of the data, whichever rank predicted a row.
    found = objective.merge(data, [merged[row] for row in range(len(data))])
    scores = objective.scores(found.predictions, found.golds, found.groups)
    return Evaluation(
        index=found.index,
        gold=found.golds,
        prediction=found.predictions,
        group=found.groups,
        columns=objective.item_columns,
        scores=scores,
        score=objective.task.score_of(scores),
    )
