"""Measure a model in memory with lm-eval."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from suite.backbones.weights import cast_weights
from suite.config.lm_eval import LmEvalConfig, Request
from suite.config.precision import gpu_precision
from suite.errors import ConfigError, DataError
from suite.evaluation.library import Library, Loaded, quiet, short_reason
from suite.record.lm_eval import Evaluation, Score, Settings, TaskScores

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU_BATCH_SIZE = 8
# Draws for the standard error of a metric that has no formula. Ours: lm-eval's 100,000 draws take
# hours for an F1.
BOOTSTRAPS = 1000
# lm-eval's own value, for a model whose positions are not bounded.
DEFAULT_LENGTH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Opened:
    """A model with the tokenizer that it was trained with."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase


def choose_device(given: str | None) -> str:
    """Return the device asked for; without one, the GPU if there is one.

    Raises:
        ConfigError: Torch knows no such device, or cannot reach it.
    """
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # Only use shows whether torch reaches a device; a build without CUDA raises AssertionError.
        torch.empty(0, device=given)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {given}: {reason}; expected cpu, cuda or cuda:N") from error
    return given


def settings_of(
    request: Request, config: LmEvalConfig, library: Library, *, positions: int | None, device: str
) -> Settings:
    """Collect everything that decides the numbers, before a model is loaded.

    Args:
        positions: Tokens that the model can see; None where it has no bound.

    Raises:
        ConfigError: `max_length` exceeds them.
    """
    if config.max_length is not None and positions is not None and config.max_length > positions:
        raise ConfigError(
            f"max_length {config.max_length}: this model has room for {positions} tokens;"
            " give at most that"
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = "fp32" if device == "cpu" else gpu_precision()
    return Settings(
        task=request.name,
        shots=request.shots,
        limit=config.limit,
        # The user's own bound comes first, then the model's.
        max_length_tokens=config.max_length or positions or DEFAULT_LENGTH_TOKENS,
        dtype=dtype,
        seed=config.seed,
        # These two are part of the record's key: an edited task file is measured anew.
        definition=library.definition(request),
        lm_eval=library.version,
    )


def check_room(loaded: Loaded, settings: Settings) -> None:
    """Check that a task's longest answer leaves room for its questions.

    Raises:
        ConfigError: It does not.
    """
    if loaded.longest_answer_tokens >= settings.max_length_tokens:
        raise ConfigError(
            f"lm-eval task {loaded.request}: an answer may have {loaded.longest_answer_tokens}"
            f" tokens, but the model sees {settings.max_length_tokens} in all; take a longer model,"
            " or a task file with generation_kwargs: {max_gen_toks: ...}"
        )


def wrap_for_lm_eval(
    opened: Opened, *, dtype: str, max_length: int, batch_size: int | str | None, device: str
) -> Any:
    """Put the model into lm-eval's own class.

    Text is encoded with the tokenizer's start token but never with an end token, which some
    tokenizers (ByT5's) put after every text.
    """
    # lm-eval is an optional package, so only those who measure import it.
    from lm_eval.models.huggingface import HFLM

    model: Any = opened.model
    # Cast first: in fp32 it may not fit on the device.
    cast_weights(model, DTYPES[dtype])
    model = model.to(device).eval()
    tokenizer: Any = opened.tokenizer
    end = tokenizer.eos_token_id
    adds_end = end is not None and tokenizer("a")["input_ids"][-1] == end
    if batch_size is None:
        batch_size = CPU_BATCH_SIZE if device == "cpu" else "auto"
    return HFLM(
        pretrained=model,
        backend="causal",
        tokenizer=tokenizer,
        max_length=max_length,
        batch_size=batch_size,
        # False also leaves out the end token; None follows the tokenizer.
        add_bos_token=False if adds_end else None,
    )


def evaluate(
    opened: Opened, loaded: Loaded, settings: Settings, *, batch_size: int | str | None, device: str
) -> Evaluation:
    """Ask a model every question of a task.

    This does what `lm_eval.simple_evaluate` does, without its survey of the machine, which takes
    longer than a small task.

    Raises:
        DataError: lm-eval cannot ask the task under these settings.
    """
    import lm_eval

    start = time.perf_counter()
    with quiet():
        lm = wrap_for_lm_eval(
            opened,
            dtype=settings.dtype,
            max_length=settings.max_length_tokens,
            batch_size=batch_size,
            device=device,
        )
        _seed(settings.seed)  # `simple_evaluate` seeds the same generators
        _prepare(loaded, settings)
        groups = _groups_of(loaded)
        tasks = {leaf.task_name: leaf for leaf in loaded.leaves}
        members = {name: group.child_names for name, group in groups.items()}
        asked: Any = {"tasks": tasks, "groups": groups, "group_map": members}
        try:
            found: Any = lm_eval.evaluate(
                lm, asked, limit=settings.limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
            )
        except (ValueError, AssertionError) as error:
            raise DataError(_why_not(loaded, settings, error)) from error
    parts = {}
    if groups:
        # A single task has no parts: its total says it all.
        parts = {name: _scores(found, name) for name in tasks}
    if device.startswith("cuda"):
        # A record is read on other machines too, where `cuda:1` is another board.
        device = torch.cuda.get_device_name(device)
    return Evaluation(
        settings=settings,
        total=_scores(found, loaded.request.name),
        parts=parts,
        missing=_missing(found, [loaded.request.name, *tasks]),
        device=device,
        batch_size=str(lm.batch_size),
        seconds=time.perf_counter() - start,
        finished_at=time.time(),
    )


def _why_not(loaded: Loaded, settings: Settings, error: Exception) -> str:
    """Say what a task may lack; lm-eval draws the shots and checks the lengths as it goes."""
    return (
        f"lm-eval task {loaded.request}: cannot be measured: {short_reason(error)}; likely it has"
        f" fewer rows than shots, or an answer of more than {settings.max_length_tokens} tokens"
        " (max_length)"
    )


def _groups_of(loaded: Loaded) -> dict[str, Any]:
    """Return the group that was asked for and all groups inside it; {} for a single task."""
    if loaded.item in loaded.leaves:
        return {}
    groups = {loaded.request.name: loaded.item}
    for inner in loaded.item.get_all_groups():
        groups[inner.name] = inner
    return groups


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _prepare(loaded: Loaded, settings: Settings) -> None:
    """Set the number of shots and the seed of their draw; another model may have used the tasks."""
    for leaf in loaded.leaves:
        if settings.shots is not None:
            leaf.set_config(key="num_fewshot", value=settings.shots)
        # lm-eval's `simple_evaluate` also takes 0 where a task's file says nothing.
        elif leaf.get_config("num_fewshot") is None:
            leaf.set_config(key="num_fewshot", value=0)
        leaf.set_fewshot_seed(seed=settings.seed)


def _entry(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One task's or group's part of lm-eval's results.

    Metrics have the keys `metric,filter`, and `metric_stderr,filter` for their standard errors.
    """
    entry: dict[str, Any] = found["results"].get(name, {}) | found.get("groups", {}).get(name, {})
    return entry


def _scores(found: Mapping[str, Any], name: str) -> TaskScores:
    entry = _entry(found, name)
    scores = {}
    for key, value in entry.items():
        number = _finite(value)
        if _is_value(key) and number is not None:
            # lm-eval writes "N/A" where it has no error: `_finite` turns it into None.
            error = entry.get(key.replace(",", "_stderr,", 1))
            scores[_plain(key)] = Score(value=number, stderr=_finite(error))
    version = found.get("versions", {}).get(name)
    if version is not None:
        version = str(version)
    return TaskScores(
        scores=scores,
        samples=int(entry.get("sample_len", 0)),
        shots=found.get("n-shot", {}).get(name),
        version=version,
    )


def _missing(found: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """The metrics that have no finite number, with what lm-eval gave instead."""
    missing = {}
    for name in names:
        for key, value in _entry(found, name).items():
            if _is_value(key) and _finite(value) is None:
                missing[f"{name}.{_plain(key)}"] = f"lm-eval gave {value!r}"
    return missing


def _is_value(key: str) -> bool:
    """Say whether a key is that of a metric's value, not of a standard error or a count."""
    return "," in key and not key.split(",")[0].endswith("_stderr")


def _plain(key: str) -> str:
    """The name in our tables: `acc,none` gives acc, `em,strict-match` gives em.strict-match."""
    metric, _, way = key.partition(",")
    if way == "none":
        return metric
    return f"{metric}.{way}"


def _finite(value: Any) -> float | None:
    if isinstance(value, (int, float, np.number)) and math.isfinite(value):
        return float(value)
    return None
