"""The generated tasks: words alone are worth nothing, test words are new, rows are the same for ever."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from suite.config.hashing import canonical_json
from suite.config.task import GeneratedData, load_task
from suite.data.generators import generators
from suite.registry import yaml_names

NAMES = ["acceptability", "entailment", "sentiment"]
CONTENT = {
    "acceptability": ("NOUNS", "ADJECTIVES", "VERBS"),
    "entailment": ("KINDS",),
    "sentiment": ("PRAISE", "BLAME"),
}


def rows(name: str, split: str, **options: Any) -> list[dict[str, Any]]:
    data = load_task(name).data
    assert isinstance(data, GeneratedData)
    return generators.get(data.generator).configure({**data.options, **options}).rows(split)


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [" ".join(str(value) for key, value in row.items() if key != "label") for row in found]


def labels(found: list[dict[str, Any]]) -> list[int]:
    return [row["label"] for row in found]


def test_every_generator_has_a_task() -> None:
    used = [load_task(name).data for name in yaml_names("tasks")]
    assert (
        {data.generator for data in used if isinstance(data, GeneratedData)}
        == set(generators.names())
        == set(NAMES)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_classifier_of_words_or_word_pairs_is_at_chance(name: str, words: int, seed: int) -> None:
    train = rows(name, "train", seed=seed)
    test = rows(name, "test", seed=seed)
    counts = CountVectorizer(ngram_range=(1, words))
    model = LogisticRegression(max_iter=1000).fit(counts.fit_transform(texts(train)), labels(train))
    # 400 rows; the groups are balanced, so the expected accuracy is 0.5 with almost no spread
    assert abs(model.score(counts.transform(texts(test)), labels(test)) - 0.5) <= 0.02


@pytest.mark.parametrize(
    ("name", "options"),
    [("acceptability", {}), ("entailment", {}), ("entailment", {"denied_frac": 0.5})],
)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_word_occurs_equally_often_with_either_label(
    name: str, options: dict[str, Any], split: str
) -> None:
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for text, label in zip(
        texts(found := rows(name, split, **options)), labels(found), strict=True
    ):
        counts[label].update(text.split())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", NAMES)
def test_content_words_of_one_split_are_new_in_another(name: str) -> None:
    module = __import__(generators.get(name).__module__, fromlist=["*"])
    lists = [getattr(module, constant) for constant in CONTENT[name]]
    content = {
        word
        for group in lists
        for text in (group.values() if isinstance(group, dict) else [group])
        for word in text.split()
    }
    used = {split: _known(rows(name, split), content) for split in ("train", "validation", "test")}
    assert all(len(words) > 10 for words in used.values())
    assert not (
        used["train"] & used["test"]
        or used["train"] & used["validation"]
        or used["validation"] & used["test"]
    )


def _known(found: list[dict[str, Any]], content: set[str]) -> set[str]:
    words = {word for text in texts(found) for word in text.split()}
    return {word for word in words | {word.removesuffix("s") for word in words} if word in content}


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_as_asked_and_no_row_is_twice(name: str) -> None:
    for split, size in (
        ("train", {"acceptability": 576, "entailment": 768, "sentiment": 768}[name]),
        ("validation", 200),
        ("test", 400),
    ):
        found = rows(name, split)
        assert len(found) == len({canonical_json(row) for row in found}) == size


@pytest.mark.parametrize("name", NAMES)
def test_a_split_does_not_depend_on_the_size_of_another(name: str) -> None:
    assert rows(name, "test", train=40) == rows(name, "test")


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_other_rows(name: str) -> None:
    assert rows(name, "train", seed=1) != rows(name, "train", seed=0)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("acceptability", "e187348ea6fdf5ab"),
        ("entailment", "0def87c18b60d71e"),
        ("sentiment", "2e88ba8d4cfa91fd"),
    ],
)
def test_rows_do_not_change_between_releases(name: str, digest: str) -> None:
    """A changed generator is another task: raise `version` in its YAML with the new digest."""
    found = canonical_json([rows(name, split) for split in ("train", "validation", "test")])
    assert hashlib.sha256(found.encode()).hexdigest()[:16] == digest


def test_no_kind_shares_a_thing_with_another() -> None:
    from suite.data.generators.entailment import KINDS

    things = [thing for words in KINDS.values() for thing in words.split()]
    assert len(things) == len(set(things)) == 100
    assert not set(things) & set(KINDS)


def test_premises_deny_as_often_as_asked() -> None:
    denied = [
        "no" in row["premise"].split() for row in rows("entailment", "train", denied_frac=0.3)
    ]
    # 160 groups of four: three standard errors are 0.11
    assert abs(sum(denied) / len(denied) - 0.3) < 0.11
    assert not any("no" in row["premise"].split() for row in rows("entailment", "train"))
