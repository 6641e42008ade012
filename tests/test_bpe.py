"""Tokenizers trained on a task's text: what they are, that they are found again, and that nothing uses one that is not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from suite.backbones.bpe import SMALLEST, draft_bpe, parse_bpe, train_bpe
from suite.backbones.loading import Head, build, load_tokenizer, resolve
from suite.config.sweep import BackboneChoice, LimitConfig
from suite.config.task import load_task
from suite.data.prepare import read_splits, split_rows
from suite.data.source import open_source
from suite.data.tokenizer import tokenizer_fingerprint
from suite.data.trained_tokenizer import open_backbone
from suite.errors import BackboneError, UnknownNameError
from suite.registry import yaml_names
from tests.texts import PAIRS, write_pairs
from tests.tiny import tiny_choice

TASK = """
kind: generation
description: a toy
source: ours
data: {hub: toy/pairs, columns: {en: translation.en, de: translation.de}}
inputs: [en]
target: de
text_to_text: "translate: {en}"
metrics: [bleu]
splits: {rule: named, test: test}
"""
GROUPED = """
description: a toy
source: ours
data: {hub: toy/groups}
inputs: [en]
text_to_text: "which: {en}"
group: [group]
label: {column: label, words: ["no", "yes"]}
metrics: [accuracy]
splits: {rule: held-out, held_out: 8}
"""
CHOICES = """
kind: multiple-choice
description: a toy
source: ours
data: {hub: toy/choices}
inputs: [en]
choices: [one, other]
stem: "{en}"
text_to_text: "which: {en} {one} {other}"
label: {column: label, words: ["no", "yes"]}
metrics: [accuracy]
splits: {rule: held-out, held_out: 8}
"""
TEXTS = [text for pair in PAIRS for text in pair]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with the rows of a task `toy-pairs`."""
    folder = tmp_path / "user" / "tasks"
    folder.mkdir(parents=True)
    (folder / "toy-pairs.yaml").write_text(TASK)
    monkeypatch.setenv("SUITE_PATH", str(tmp_path / "user"))
    return write_pairs(tmp_path / "data", train=48, validation=4, test=4)


def choice(
    size: int = 300, *, family: str = "t5", task: str = "toy-pairs", **changes: Any
) -> BackboneChoice:
    return tiny_choice(family, **changes).model_copy(update={"tokenizer": f"bpe:{size}:{task}"})


def opened(root: Path, of: BackboneChoice) -> Any:
    return open_backbone(of, data_root=root, cache=root.parent / "cache")


def test_the_same_texts_give_the_same_tokenizer_and_it_merges() -> None:
    first = train_bpe(TEXTS, 300)
    second = train_bpe(TEXTS, 300)
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second)
    assert len(first) == 300
    assert len(first("the cat sees the dog")["input_ids"]) < len(
        draft_bpe()("the cat sees the dog")["input_ids"]
    )


@pytest.mark.parametrize(
    "text", ["the cat sees", " two  spaces ", "Übermäßig, 猫 \n tab\t!", "never seen: ζ"]
)
def test_any_text_comes_back_and_ends_with_the_end_token(text: str) -> None:
    tokenizer = train_bpe(TEXTS, 300)
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_both_sides_of_a_translation_share_the_vocabulary(root: Path) -> None:
    tokenizer = load_tokenizer(opened(root, choice(400, vocab_size=400)))
    for word in (" cat", "Katze"):
        assert len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1


def test_it_is_trained_once_from_the_whole_training_split_and_found_again(root: Path) -> None:
    first = opened(root, choice())
    files = {path: path.stat().st_mtime_ns for path in first.tokenizer.iterdir()}
    assert (
        opened(root, choice()).tokenizer == first.tokenizer != opened(root, choice(310)).tokenizer
    )
    assert {path: path.stat().st_mtime_ns for path in first.tokenizer.iterdir()} == files
    texts = [pair[side] for side in (0, 1) for pair in PAIRS[:48]]
    assert tokenizer_fingerprint(load_tokenizer(first)) == tokenizer_fingerprint(
        train_bpe(texts, 300)
    )


def test_rows_that_a_group_keeps_out_shape_no_vocabulary(root: Path) -> None:
    (root.parent / "user" / "tasks" / "toy-groups.yaml").write_text(GROUPED)
    rows = [{"en": en, "group": n // 4, "label": n % 2} for n, (en, _) in enumerate(PAIRS[:48])]
    folder = root / "toy" / "groups" / "default"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    task = load_task("toy-groups")
    source = open_source(task, root)
    table = read_splits(task, source)["train"]
    part = split_rows(task, {"train": table}, LimitConfig(), where="")["train"]
    texts = [table["en"][row].as_py() for row in part.rows.tolist()]
    assert len(texts) == 48 - 2 * 8
    found = load_tokenizer(opened(root, choice(task="toy-groups")))
    assert tokenizer_fingerprint(found) == tokenizer_fingerprint(train_bpe(texts, 300))


def test_other_text_gives_another_tokenizer(root: Path) -> None:
    before = opened(root, choice()).tokenizer
    write_pairs(root, train=10)
    assert opened(root, choice()).tokenizer != before


def test_other_choices_give_another_tokenizer(root: Path) -> None:
    rows = [
        {"en": en, "one": "a", "other": "b", "another": de, "label": n % 2}
        for n, (en, de) in enumerate(PAIRS[:48])
    ]
    folder = root / "toy" / "choices" / "default"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    found = []
    for text in (CHOICES, CHOICES.replace("other", "another")):
        (root.parent / "user" / "tasks" / "toy-choices.yaml").write_text(text)
        found.append(load_tokenizer(opened(root, choice(task="toy-choices"))))
    assert "atze" not in " ".join(found[0].get_vocab())
    assert "atze" in " ".join(found[1].get_vocab())


@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
def test_the_backbone_has_the_tokens_of_its_tokenizer(root: Path, family: str) -> None:
    resolved = opened(root, choice(family=family))
    tokenizer = load_tokenizer(resolved)
    assert (
        (resolved.config.pad_token_id, resolved.config.eos_token_id)
        == (tokenizer.pad_token_id, tokenizer.eos_token_id)
        == (0, 1)
    )
    torch.manual_seed(0)
    model: Any = build(resolved, Head("text")).eval()
    with torch.no_grad():
        batch = {"input_ids": torch.tensor([tokenizer("the cat")["input_ids"]])}
        assert model(**batch, labels=batch["input_ids"]).loss.isfinite()


def test_a_plan_can_be_checked_before_the_text_is_read_but_nothing_else() -> None:
    resolved = resolve(choice(task="ptb"))
    assert len(load_tokenizer(resolved, draft=True)) == SMALLEST
    with pytest.raises(BackboneError, match="bpe:300:ptb is not trained"):
        load_tokenizer(resolved)


@pytest.mark.parametrize("name", ["bpe:ptb", "bpe:8k:ptb", "bpe:100:ptb", "bpe:8000:"])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(BackboneError, match=r"expected bpe:SIZE:TASK, SIZE at least 258"):
        parse_bpe(name)


def test_other_names_are_not_meant() -> None:
    assert parse_bpe(None) is parse_bpe("bytes") is parse_bpe("org/bpe") is None


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused_before_training() -> None:
    with pytest.raises(BackboneError, match="vocab_size 384, but the tokenizer has 8000 tokens"):
        resolve(choice(8000, task="ptb"))


def test_an_unknown_task_is_refused_with_near_names() -> None:
    assert "ptb" in yaml_names("tasks")
    with pytest.raises(
        UnknownNameError,
        match=r"s\.yaml: tokenizer bpe:300:ptbb: unknown task 'ptbb'; did you mean ptb",
    ):
        resolve(choice(task="ptbb"), where="s.yaml")
