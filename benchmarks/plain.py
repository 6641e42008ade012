"""The peer: a plain PyTorch loop with Hugging Face models and PEFT, as one would write it by hand. No code of `suite.train`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from sklearn.metrics import accuracy_score, f1_score
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

WARMUP_FRAC = 0.06
UNTIMED_STEPS = 3
METRICS = {"accuracy": accuracy_score, "f1": f1_score}


@dataclass(frozen=True)
class PlainRun:
    """The score in percent per epoch and on test, and the speed of the timed steps."""

    validation: list[float]
    test: float | None
    samples_per_s: float


def make_model(
    folder: str, method: str, *, num_labels: int, lora: Mapping[str, Any]
) -> torch.nn.Module:
    """A pretrained encoder with a new head; `full`, `bitfit`, or `lora` through PEFT."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels)
    if method == "full":
        return model
    if method == "bitfit":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith(".bias") or name.startswith("classifier.")
        return model
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules=["query", "value"],
    )
    return get_peft_model(model, config)


def train(
    splits: Mapping[str, Dataset],
    *,
    folder: str,
    method: str,
    lora: Mapping[str, Any],
    learning_rate: float,
    batch_size: int,
    seed: int,
    orders: Sequence[Sequence[int]],
    clip: float = 1.0,
    metrics: Sequence[str] = ("accuracy",),
    bf16: bool = False,
) -> PlainRun:
    """Train on tokenised splits with columns `input_ids` and `gold`; evaluate each epoch, test with the best epoch's weights.

    Args:
        orders: Per epoch, the training rows in the order in which they are seen.
        metrics: Of `METRICS`; their mean is the score.
        bf16: Compute under torch's autocast, with weights in fp32; else all in fp32.
    """
    torch.manual_seed(seed)
    model = make_model(folder, method, num_labels=len(set(splits["train"]["gold"])), lora=lora)
    collate = DataCollatorWithPadding(AutoTokenizer.from_pretrained(folder), pad_to_multiple_of=8)
    rows = rows_of(splits["train"])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    total = len(rows) // batch_size * len(orders)
    schedule = get_linear_schedule_with_warmup(optimizer, math.ceil(WARMUP_FRAC * total), total)
    validation, best, seconds, samples = [], {}, 0.0, 0
    for order in orders:
        model.train()
        loader = DataLoader(
            rows, batch_size=batch_size, sampler=order, drop_last=True, collate_fn=collate
        )
        for step, batch in enumerate(loader):
            began = time.perf_counter()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(trained, clip)
            optimizer.step()
            schedule.step()
            if step >= UNTIMED_STEPS:
                seconds, samples = seconds + time.perf_counter() - began, samples + batch_size
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            validation.append(score(model, splits["validation"], collate, metrics))
        if validation[-1] == max(validation):
            best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    test = None
    if "test" in splits:
        model.load_state_dict(best)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            test = score(model, splits["test"], collate, metrics)
    return PlainRun(validation, test, samples / seconds)


def rows_of(split: Dataset) -> list[dict[str, Any]]:
    """The rows of a split as a collator takes them; pairs of texts say which text a token is of."""
    columns = {"input_ids": split["input_ids"], "labels": split["gold"]}
    if "token_type_ids" in split.column_names:
        columns["token_type_ids"] = split["token_type_ids"]
    rows = []
    for values in zip(*columns.values(), strict=True):
        rows.append(dict(zip(columns, values, strict=True)))
    return rows


@torch.no_grad()
def score(model: torch.nn.Module, split: Dataset, collate: Any, metrics: Sequence[str]) -> float:
    """Mean of the metrics in percent, of the arg-max of the logits."""
    model.eval()
    predicted: list[int] = []
    for batch in DataLoader(rows_of(split), batch_size=96, collate_fn=collate):
        predicted += model(**batch).logits.argmax(-1).tolist()
    found = [METRICS[name](list(split["gold"]), predicted) for name in metrics]
    return 100.0 * float(sum(found)) / len(found)
