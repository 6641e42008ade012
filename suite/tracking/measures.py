"""What the runs of a cell took, and how large its model is: fields of its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from suite.record.result import TrialResult


def sizes(results: Iterable[TrialResult]) -> dict[str, Any]:
    """Of the first result that counted them: they are the same for all."""
    found = next((r.parameters for r in results if r.parameters is not None), None)
    if found is None:
        return {}
    return {
        "trainable_parameters": found.trainable,
        "total_parameters": found.total,
        "attention_parameters": found.attention_parameters,
        "kv_bytes_per_token": found.kv_bytes_per_token,
    }


def run_cost(runs: Sequence[TrialResult]) -> dict[str, Any]:
    """Means over the confirm runs, of memory the maximum; of the train phase, null where one run could not measure it."""
    train = [r.phases.get("train") for r in runs]
    peaks = [None if p is None else p.memory.allocated_max_bytes for p in train]
    return {
        "energy_kwh": mean(None if p is None else p.energy_kwh for p in train),
        "energy_source": join(p.energy_source for p in train if p is not None),
        "peak_memory_bytes": None
        if not peaks or None in peaks
        else max(p for p in peaks if p is not None),
        "train_s": mean(None if p is None else p.seconds for p in train),
        "samples_per_s": mean(None if r.timing is None else r.timing.samples_per_s for r in runs),
    }


def pretrain_cost(results: Iterable[TrialResult]) -> dict[str, Any]:
    """Of the one run that gave all trials of the cell their weights."""
    found = next((r.pretrain for r in results if r.pretrain is not None), None)
    if found is None:
        return {}
    return {
        "pretrain_energy_kwh": found.energy_kwh,
        "pretrain_s": found.train_s,
        "pretrain_steps": found.steps,
    }


def search_cost(ended: Sequence[TrialResult]) -> dict[str, Any]:
    """Trials that failed before they measured anything add nothing; one phase without energy makes the energy null."""
    phases = [p for r in ended for p in r.phases.values()]
    energies = [p.energy_kwh for p in phases]
    return {
        "search_energy_kwh": None
        if not energies or None in energies
        else math.fsum(e for e in energies if e is not None),
        "search_s": math.fsum(p.seconds for p in phases) if phases else None,
    }


def mean(values: Iterable[float | None]) -> float | None:
    """Mean, or None when there is no value or one of them is missing."""
    asked = list(values)
    known = [v for v in asked if v is not None]
    return fmean(known) if known and len(known) == len(asked) else None


def join(names: Iterable[str | None]) -> str | None:
    """Distinct names, `nvml+rapl`; None when there is none."""
    return "+".join(sorted({n for n in names if n})) or None
