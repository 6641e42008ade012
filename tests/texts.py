"""Small tasks of text with rows of their own, under a temporary data root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from suite.config.task import GenerationTask, LanguageModelTask

SPLITS = {"rule": "named", "test": "test"}
NOUNS = {"cat": "Katze", "dog": "Hund", "tree": "Baum", "house": "Haus"}
VERBS = {"sees": "sieht", "likes": "mag", "finds": "findet"}
PAIRS = [
    (f"the {a} {v} the {b}", f"{NOUNS[a]} {VERBS[v]} {NOUNS[b]}")
    for a in NOUNS
    for v in VERBS
    for b in NOUNS
]


def prose_task(**changes: Any) -> LanguageModelTask:
    fields = {
        "name": "prose",
        "description": "t",
        "source": "t",
        "data": {"hub": "toy/prose"},
        "inputs": ["text"],
        "splits": SPLITS,
    }
    return LanguageModelTask.model_validate({"kind": "language-model", **fields, **changes})


def toy_translation(**changes: Any) -> GenerationTask:
    """Nested columns, as WMT has them."""
    columns = {"en": "translation.en", "de": "translation.de"}
    fields = {
        "name": "toy-en-de",
        "description": "t",
        "source": "t",
        "data": {"hub": "toy/pairs", "columns": columns},
        "splits": SPLITS,
        "kind": "generation",
        "inputs": ["en"],
        "target": "de",
        "text_to_text": "translate: {en}",
        "metrics": ["bleu", "rouge1"],
    }
    return GenerationTask.model_validate({**fields, **changes})


def write_prose(root: Path, **texts: list[str]) -> Path:
    """A split per keyword, one row per text."""
    for split, rows in texts.items():
        _write(root / "toy" / "prose" / "default" / f"{split}.parquet", {"text": rows})
    return root


def write_pairs(root: Path, **counts: int) -> Path:
    """A split per keyword with the first so many of `PAIRS`."""
    for split, count in counts.items():
        rows = [{"en": en, "de": de} for en, de in PAIRS[:count]]
        _write(root / "toy" / "pairs" / "default" / f"{split}.parquet", {"translation": rows})
    return root


def _write(path: Path, columns: dict[str, list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
