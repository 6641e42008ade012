"""A model in memory, measured by lm-eval."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from suite.config.lm_eval import LmEvalConfig, Request
from suite.errors import ConfigError
from suite.evaluation.library import Library, Loaded, quiet
from suite.record.lm_eval import Evaluation, Score, Settings, TaskScores

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU_BATCH_SIZE = 8
BOOTSTRAPS = 1000
"""Draws for the standard error of a metric that has no formula (ours; lm-eval's 100,000 take hours for an F1)."""
LENGTH_BY_DEFAULT = 2048
"""lm-eval's, for a model whose positions are not bounded."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model with the tokenizer that it was trained with."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase


def choose_device(given: str | None) -> str:
    """The device asked for, or the GPU if there is one.

    Raises:
        ConfigError: Torch knows no such device, or cannot reach it.
    """
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=given)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {given}: {str(error).splitlines()[0]}; expected cpu, cuda or cuda:N"
        ) from error
    return given


def settings_of(
    request: Request, config: LmEvalConfig, library: Library, *, positions: int | None, device: str
) -> Settings:
    """What decides the numbers, complete before a model is loaded.

    Args:
        positions: Tokens that the model can see, None where it has no bound.

    Raises:
        ConfigError: `max_length` exceeds them.
    """
    if config.max_length is not None and positions is not None and config.max_length > positions:
        raise ConfigError(
            f"max_length {config.max_length}: this model has room for {positions} tokens; give at most that"
        )
    return Settings(
        task=request.name,
        shots=request.shots,
        limit=config.limit,
        max_length_tokens=config.max_length or positions or LENGTH_BY_DEFAULT,
        dtype=("fp32" if device == "cpu" else "bf16") if config.dtype == "auto" else config.dtype,
        seed=config.seed,
        definition=library.definition(request),
        lm_eval=library.version,
    )


def check_room(loaded: Loaded, settings: Settings) -> None:
    """Raise ConfigError where the answers that a task lets a model write leave no room for its questions."""
    if loaded.longest_answer_tokens >= settings.max_length_tokens:
        raise ConfigError(
            f"lm-eval task {loaded.request}: an answer may have {loaded.longest_answer_tokens} tokens, but the model sees "
            f"{settings.max_length_tokens} in all; take a longer model, or a task file with generation_kwargs: {{max_gen_toks: ...}}"
        )


def hand_over(
    opened: Opened, *, dtype: str, max_length: int, batch_size: int | str | None, device: str
) -> Any:
    """The model as lm-eval takes it.

    Parameters are cast and buffers are not, as in Hugging Face's own loading: rotary frequencies lose too much in bf16.
    Text is encoded with the tokenizer's start token but never with an end token, which some (ByT5) put after every text.
    """
    from lm_eval.models.huggingface import HFLM

    model: Any = opened.model.to(device).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    ids = opened.tokenizer("a")["input_ids"]
    ends = opened.tokenizer.eos_token_id is not None and ids[-1] == opened.tokenizer.eos_token_id
    tokenizer: Any = opened.tokenizer
    return HFLM(
        pretrained=model,
        backend="causal",
        tokenizer=tokenizer,
        max_length=max_length,
        batch_size=batch_size or (CPU_BATCH_SIZE if device == "cpu" else "auto"),
        add_bos_token=False if ends else None,
    )


def evaluate(
    opened: Opened, loaded: Loaded, settings: Settings, *, batch_size: int | str | None, device: str
) -> Evaluation:
    """Ask a model every question of a task.

    Prepared and run as `lm_eval.simple_evaluate` does, without its survey of the machine, which takes longer than a small task.
    """
    import lm_eval

    start = time.perf_counter()
    with quiet():
        lm = hand_over(
            opened,
            dtype=settings.dtype,
            max_length=settings.max_length_tokens,
            batch_size=batch_size,
            device=device,
        )
        _seed(settings.seed)
        _prepare(loaded, settings)
        tasks = {leaf.task_name: leaf for leaf in loaded.leaves}
        groups = (
            {}
            if loaded.item in loaded.leaves
            else {loaded.request.name: loaded.item, **_inner_groups(loaded.item)}
        )
        names = {name: group.child_names for name, group in groups.items()}
        given: Any = {"tasks": tasks, "groups": groups, "group_map": names}
        found: Any = lm_eval.evaluate(
            lm, given, limit=settings.limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
        )
    parts = {name: _scores(found, name) for name in tasks}
    total, missing = (
        _scores(found, loaded.request.name),
        _missing(found, (loaded.request.name, *tasks)),
    )
    return Evaluation(
        settings=settings,
        total=total,
        parts=parts if groups else {},
        missing=missing,
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        batch_size=str(lm.batch_size),
        seconds=time.perf_counter() - start,
        finished_at=time.time(),
    )


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _prepare(loaded: Loaded, settings: Settings) -> None:
    """Shots and their draw, on tasks that may have been used for another model."""
    for leaf in loaded.leaves:
        if settings.shots is not None:
            leaf.set_config(key="num_fewshot", value=settings.shots)
        elif leaf.get_config("num_fewshot") is None:
            leaf.set_config(key="num_fewshot", value=0)
        leaf.set_fewshot_seed(seed=settings.seed)


def _inner_groups(group: Any) -> dict[str, Any]:
    return {inner.name: inner for inner in group.get_all_groups()}


def _scores(found: Mapping[str, Any], name: str) -> TaskScores:
    """One task's or group's entry of lm-eval's results, whose keys are `metric,filter` and `metric_stderr,filter`."""
    entry = {**found["results"].get(name, {}), **found.get("groups", {}).get(name, {})}
    scores = {
        _plain(key): Score(
            value=float(value), stderr=_number(entry.get(key.replace(",", "_stderr,", 1)))
        )
        for key, value in entry.items()
        if _is_metric(key) and _number(value) is not None
    }
    return TaskScores(
        scores=scores,
        samples=int(entry.get("sample_len", 0)),
        shots=found.get("n-shot", {}).get(name),
        version=None if (v := found.get("versions", {}).get(name)) is None else str(v),
    )


def _missing(found: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    """Metrics without a finite number."""
    entries = {
        name: {**found["results"].get(name, {}), **found.get("groups", {}).get(name, {})}
        for name in names
    }
    return {
        f"{name}.{_plain(key)}": f"lm-eval gave {value!r}"
        for name, entry in entries.items()
        for key, value in entry.items()
        if _is_metric(key) and _number(value) is None
    }


def _is_metric(key: str) -> bool:
    return "," in key and not key.split(",")[0].endswith("_stderr")


def _plain(key: str) -> str:
    """`acc,none` -> acc; `exact_match,strict-match` -> exact_match.strict-match."""
    metric, _, way = key.partition(",")
    return metric if way == "none" else f"{metric}.{way}"


def _number(value: Any) -> float | None:
    return (
        float(value)
        if isinstance(value, (int, float, np.number)) and math.isfinite(value)
        else None
    )
