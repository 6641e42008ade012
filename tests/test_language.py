"""Language modelling: blocks, windows, and perplexity against a reference that reads one window after another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer

from suite.backbones.loading import Head, build, resolve
from suite.config.sweep import LimitConfig
from suite.config.training import TrainingConfig
from suite.data.language_model import LanguageModelObjective
from suite.data.make_objective import make_objective
from suite.data.prepare import Prepared, prepare
from suite.data.running_text import blocks, windows
from suite.errors import DataError, IncompatibleError
from suite.metrics.text import perplexity
from tests.texts import prose_task, write_prose
from tests.tiny import tiny_choice

ROWS = [
    "It rains.",
    "",
    "It is dry, and has been so for days; nobody minds.",
    "Then it rains again.",
]
END = ByT5Tokenizer().eos_token_id


def objective(*, kind: Any = "decoder", **training: Any) -> LanguageModelObjective:
    settings = TrainingConfig(**{"max_length": 16, "stride": 6, **training})
    made = make_objective(
        prose_task(),
        kind=kind,
        tokenizer=ByT5Tokenizer(),
        training=settings,
        decoder_objective="head",
    )
    assert isinstance(made, LanguageModelObjective)
    return made


def prepared(
    folder: Path, goal: LanguageModelObjective, limit: LimitConfig | None = None, **texts: list[str]
) -> Prepared:
    root = write_prose(
        folder / "data", **{"train": ROWS, "validation": ROWS, "test": ROWS, **texts}
    )
    return prepare(
        goal.task, goal, limit=limit or LimitConfig(), data_root=root, cache=folder / "cache"
    )


def rows_of(data: Prepared, split: Any) -> list[dict[str, Any]]:
    return list(data.split(split, confirm=True))


def tokens_of(texts: list[str]) -> list[int]:
    """Every row that is not empty with the end-of-text token after it."""
    return [
        token
        for text in texts
        if text
        for token in (*ByT5Tokenizer()(text, add_special_tokens=False)["input_ids"], END)
    ]


def reference(model: Any, tokens: list[int], length: int, stride: int) -> float:
    """Perplexity of all tokens but the first, each in the first window that reaches it, one window at a time and unpadded."""
    losses = []
    scored = 1
    for end in [*range(length, len(tokens), stride), len(tokens)]:
        start = max(0, end - length)
        logits = (
            model(input_ids=torch.tensor([tokens[start:end]])).logits[0].double().log_softmax(-1)
        )
        losses += [-float(logits[i - start - 1, tokens[i]]) for i in range(scored, end)]
        scored = end
    assert len(losses) == len(tokens) - 1
    return math.exp(sum(losses) / len(losses))


@torch.no_grad()
def scored_by(goal: LanguageModelObjective, model: Any, data: Prepared, *, batch: int) -> float:
    rows = rows_of(data, "test")
    sums = [
        nll
        for i in range(0, len(rows), batch)
        for nll in goal.predict(model, goal.collate(rows[i : i + batch]), synced=False)
    ]
    return goal.score(sums, [row["gold"] for row in rows])["perplexity"]


def test_blocks_join_separate_cut_and_drop_the_rest() -> None:
    found = blocks([[1, 2], [], [3, 4, 5], [6]], 3, separator=0)
    assert list(found) == [[1, 2, 0], [3, 4, 5], [0, 6, 0]]
    assert list(blocks([[1, 2], [3, 4, 5]], 2, separator=None)) == [[1, 2], [3, 4]]
    assert list(blocks([], 2, separator=0)) == []


@pytest.mark.parametrize(
    ("count", "length", "stride"),
    [(1, 4, 2), (2, 4, 2), (4, 4, 3), (5, 4, 1), (11, 4, 3), (12, 5, 4), (30, 8, 3)],
)
def test_every_token_but_the_first_is_scored_once_with_enough_before_it(
    count: int, length: int, stride: int
) -> None:
    seen: list[int] = []
    for window, scored in windows(range(count), length, stride=stride):
        assert window == list(range(window[0], window[-1] + 1)) and len(window) <= length
        seen += window[-scored:]
        assert window[-scored] - window[0] >= min(window[-scored], length - stride)
    assert seen == list(range(1, count))


def test_blocks_of_train_hold_the_joined_text(tmp_path: Path) -> None:
    rows = rows_of(prepared(tmp_path, objective()), "train")
    whole = tokens_of(ROWS)
    assert [token for row in rows for token in row["input_ids"]] == whole[: len(whole) // 16 * 16]
    assert {row["units"] for row in rows} == {15}, (
        "the first token of a block has nothing before it"
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("length", "stride"), [(16, 6), (16, 15), (12, 1), (128, 64)])
def test_perplexity_equals_a_reference_that_reads_one_window_at_a_time(
    tmp_path: Path, family: str, length: int, stride: int
) -> None:
    torch.manual_seed(0)
    model = build(resolve(tiny_choice(family)), Head("text")).eval()
    goal = objective(max_length=length, stride=stride)
    data = prepared(tmp_path, goal, train=ROWS * 5)
    with torch.no_grad():
        expected = reference(model, [END, *tokens_of(ROWS)], length, stride)
    found = [scored_by(goal, model, data, batch=batch) for batch in (1, 3, 100)]
    # fp32 logits against a reference in fp64
    assert found == pytest.approx([expected] * 3, rel=1e-5)


def test_a_model_that_knows_nothing_has_the_vocabulary_as_its_perplexity(tmp_path: Path) -> None:
    model: Any = build(resolve(tiny_choice("gpt2")), Head("text")).eval()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()
    goal = objective()
    assert scored_by(goal, model, prepared(tmp_path, goal), batch=4) == pytest.approx(384, rel=1e-6)


def test_the_loss_of_a_block_is_the_mean_over_its_units(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = build(resolve(tiny_choice("gpt2")), Head("text")).eval()
    goal = objective()
    rows = rows_of(prepared(tmp_path, goal), "train")[:2]
    with torch.no_grad():
        loss = float(model(**goal.collate(rows)).loss)
        sums = goal.predict(model, goal.collate(rows), synced=False)
    assert sum(sums) / sum(row["units"] for row in rows) == pytest.approx(loss, rel=1e-6)


def test_a_limit_takes_the_first_rows_of_running_text(tmp_path: Path) -> None:
    texts = [f"sentence {i}" for i in range(50)]
    rows = rows_of(prepared(tmp_path, objective(), LimitConfig(train=10), train=texts), "train")
    whole = tokens_of(texts[:10])
    assert [token for row in rows for token in row["input_ids"]] == whole[: len(whole) // 16 * 16]


def test_perplexity_is_over_all_tokens_and_overflows_to_infinity() -> None:
    assert perplexity([2.0, 6.0], [1, 3]) == pytest.approx(math.exp(2.0))
    assert perplexity([1e6], [1]) == math.inf
    with pytest.raises(ValueError, match="no token"):
        perplexity([], [])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "encoder"}, "use a decoder-only backbone"),
        ({"kind": "encoder-decoder"}, "use a decoder-only backbone"),
        ({"stride": 16}, "training.stride below training.max_length"),
        ({"stride": None}, "max_length 16 tokens with stride 256"),
    ],
)
def test_what_cannot_be_scored_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatibleError, match=says):
        objective(**changes)


def test_a_text_shorter_than_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="split 'train': the text is too short"):
        prepared(tmp_path, objective(), train=["short"])


def test_the_fingerprint_knows_length_and_stride_but_not_the_batch() -> None:
    base = objective().fingerprint()
    assert base == objective(batch_size=4, eval_batch_size=2).fingerprint()
    assert base not in (objective(stride=7).fingerprint(), objective(max_length=17).fingerprint())
