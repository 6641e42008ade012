"""Multiple choice and the other tasks of SuperGLUE: heads, likelihoods, groups, marks, and what their files may not say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultipleChoice, ByT5Tokenizer

from suite.backbones.base import Kind
from suite.backbones.loading import Head, build
from suite.config.arm import Arm
from suite.config.sweep import LimitConfig
from suite.config.task import SplitConfig, load_task, make_task
from suite.config.task_files import load_code, task_paths
from suite.config.training import TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.objective import Objective
from suite.data.splits import plan_splits
from suite.errors import ConfigError, DataError, IncompatibleError
from suite.metrics.quality import score
from suite.petl import methods
from suite.petl.arm import build_arm, count, task_head
from tests.tiny import tiny_choice
from tests.toy import SMALL, learn, resolved_tiny

COPA = {
    "premise": ["The sun rose.", "I fell."],
    "question": ["effect", "cause"],
    "choice1": ["The grass was cut, and then it was cut again.", "I slipped."],
    "choice2": ["It got light.", "I sang, loudly and for a very long time."],
    "label": [1, 0],
}
FAMILIES: list[tuple[Kind, str, str]] = [("encoder", "head", "bert"), ("encoder-decoder", "text", "t5"), ("decoder", "head", "gpt2"),
                                         ("decoder", "head", "llama"), ("decoder", "text", "gpt2")]  # fmt: skip
HEADS = [("bert", Head("choice")), ("bert", Head("span")), ("gpt2", Head("choice"))]


def copa(kind: Kind, decoder: str, **training: Any) -> Objective:
    settings = TrainingConfig(**{"target_max_length": 16, "max_length": 100, **training})
    return make_objective(
        load_task("copa"),
        kind=kind,
        tokenizer=ByT5Tokenizer(),
        training=settings,
        decoder_objective=decoder,
    )  # type: ignore[arg-type]


def rows_of(goal: Objective, columns: dict[str, list[Any]] = COPA) -> list[dict[str, Any]]:
    features = goal.encode(columns)
    return [
        dict(zip(features, values, strict=True)) for values in zip(*features.values(), strict=True)
    ]


def read(ids: list[int]) -> str:
    return str(ByT5Tokenizer().decode([i for i in ids if i >= 0], skip_special_tokens=True))


# what is read


def test_every_family_reads_the_choices_in_its_own_way() -> None:
    stem = "The sun rose. What was the effect of this?"
    pairs, one, words, plain = (
        rows_of(copa(kind, decoder))[0]
        for kind, decoder, _ in (FAMILIES[0], FAMILIES[2], FAMILIES[1], FAMILIES[4])
    )
    assert [read(ids) for ids in pairs["input_ids"]] == [
        stem + COPA["choice1"][0],
        stem + COPA["choice2"][0],
    ]
    assert [read(ids) for ids in one["input_ids"]] == [
        f"{stem} {COPA['choice1'][0]}",
        f"{stem} {COPA['choice2'][0]}",
    ]
    assert read(words["input_ids"]).startswith(
        "copa choice1: The grass was cut, and then it was cut again. choice2: It got light. premise: The sun"
    )
    assert read(words["labels"]) == "choice2"
    assert (
        read(plain["input_ids"]) == f"{stem} It got light."
        and read(plain["labels"]) == " It got light."
    )


@pytest.mark.parametrize(("kind", "decoder", "family"), FAMILIES)
def test_every_family_learns_to_choose_whatever_the_labels_say(
    kind: Kind, decoder: str, family: str
) -> None:
    goal = copa(kind, decoder)
    torch.manual_seed(0)
    model = build(resolved_tiny(family), goal.head).eval()
    learn(model, goal.collate(rows_of(goal)))
    with torch.no_grad():
        for columns in (COPA, {**COPA, "label": [0, 1]}):
            assert goal.predict(model, goal.collate_eval(rows_of(goal, columns)), synced=False) == [
                1.0,
                0.0,
            ]


def test_the_head_over_choices_is_the_librarys() -> None:
    """Same weights, same logits and loss as the multiple-choice model of transformers."""
    goal = copa("encoder", "head")
    resolved = resolved_tiny("bert")
    torch.manual_seed(0)
    model = build(resolved, goal.head).eval()
    library = AutoModelForMultipleChoice.from_config(
        resolved.config, attn_implementation="sdpa"
    ).eval()
    library.load_state_dict(model.state_dict())
    batch = goal.collate(rows_of(goal))
    assert batch["input_ids"].shape[:2] == (2, 2)
    with torch.no_grad():
        ours = model(**batch)
        theirs = library(**batch)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-6)
    assert float(ours.loss) == pytest.approx(float(theirs.loss), rel=1e-5)


def test_a_decoder_compares_mean_log_likelihoods() -> None:
    goal = copa("decoder", "text")
    torch.manual_seed(3)
    model = build(resolved_tiny("gpt2"), goal.head).eval()
    with torch.no_grad():
        for row in rows_of(goal):
            batches = [
                goal.collate([{"input_ids": s + c, "labels": [-100] * len(s) + c}])
                for s, c in zip(row["stems"], row["choices"], strict=True)
            ]
            losses = [
                float(model(**batch).loss) for batch in batches
            ]  # the model's own loss is the mean over the choice's tokens
            assert goal.predict(model, goal.collate_eval([row]), synced=False) == [
                float(np.argmin(losses))
            ]


def test_what_is_too_long_loses_the_end_of_the_stem_not_the_choice() -> None:
    long = {**COPA, "premise": ["on " * 50, "and " * 50]}
    for kind, decoder, _ in FAMILIES[2:]:
        goal = copa(kind, decoder, max_length=60)
        ids = rows_of(goal, long)[0]["input_ids"]
        assert read(ids[1] if decoder == "head" else ids).endswith("It got light.")
    with pytest.raises(
        DataError, match=r"a choice has 47 tokens, which leaves none of training.max_length 40"
    ):
        copa("decoder", "text", max_length=40).encode(COPA)


# heads and methods


@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize(("family", "head"), HEADS, ids=lambda value: getattr(value, "kind", value))
def test_every_method_trains_the_new_heads(method: str, family: str, head: Head) -> None:
    resolved = resolved_tiny(family)
    torch.manual_seed(0)
    options = SMALL.get(method, {})
    model, petl = build_arm(
        resolved, head, Arm(backbone=resolved.choice, method=method, architecture=options)
    )
    batch = toy_batch(head)
    if petl.needs_preparation:
        petl.prepare(model, resolved.family, [batch], lambda model, batch: model(**batch).loss)
    counted = count(model, task_head(model, resolved))
    assert counted.head >= 32 and counted.method == petl.expected_trainable(
        build(resolved, head, meta=True), resolved.family
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=5e-3)
    losses = []
    reached = set()
    for _ in range(20):
        optimizer.zero_grad()
        (loss := model(**batch).loss).backward()
        reached |= {name for name, p in trained.items() if p.grad is not None and p.grad.any()}
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    shared = {name for name in trained if name.endswith(("classifier.bias", "qa_outputs.bias"))}
    assert reached >= trained.keys() - shared, (
        "a bias that all choices, or all tokens, share cancels in the softmax"
    )


def toy_batch(head: Head) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shape = (4, 3, 9) if head.kind == "choice" else (4, 9)
    ids = torch.randint(10, 60, shape, generator=draw)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if head.kind == "choice":
        return {**batch, "labels": torch.tensor([0, 1, 2, 1])}
    return {
        **batch,
        "start_positions": torch.tensor([0, 2, 4, 1]),
        "end_positions": torch.tensor([0, 3, 4, 5]),
    }


@pytest.mark.parametrize("method", ["peft:prefix-tuning", "peft:prompt-tuning"])
def test_pefts_prompts_do_not_go_with_them(method: str) -> None:
    heads = [*HEADS[:2]]
    # transformers gives the map of a span head another name there
    if method == "peft:prompt-tuning":
        heads.append(("modernbert", Head("span")))
    for family, head in heads:
        with pytest.raises(IncompatibleError, match=f"{method}: .*use method prompt"):
            build_arm(
                resolved_tiny(family),
                head,
                Arm(
                    backbone=tiny_choice(family),
                    method=method,
                    architecture=SMALL["peft:prefix-tuning"],
                ),
            )


def test_only_encoders_point_at_spans() -> None:
    for family, says in (("t5", "answers in text only"), ("gpt2", "does not read both ways")):
        with pytest.raises(IncompatibleError, match=f"{says}, got a span head"):
            build(resolved_tiny(family), Head("span"))


# metrics


def test_macro_f1_is_the_plain_mean_over_classes() -> None:
    gold = [0, 0, 0, 1, 1, 2]
    answers = [0, 0, 1, 1, -1, 0]
    # class 0: 2 of 3 said, 2 of 3 found -> 2/3; class 1: 1 of 2, 1 of 2 -> 1/2; class 2: 0; no label is no class
    assert score(["macro_f1"], answers, gold)["macro_f1"] == pytest.approx(
        100 * (2 / 3 + 1 / 2 + 0) / 3
    )
    assert score(["macro_f1"], [0, 1, 1], [0, 1, 0])["macro_f1"] == pytest.approx(
        100 * (2 / 3 + 2 / 3) / 2
    ), "a class that never occurs is left out"


def test_a_group_is_right_only_as_a_whole() -> None:
    gold = [1, 0, 1, 1, 0]
    answers = [1, 0, 1, 0, 0]
    groups = ["a", "a", "b", "b", "c"]
    found = score(["f1", "group_em"], answers, gold, groups)
    assert found == {
        "f1": pytest.approx(100 * 2 * 2 / (2 + 3)),
        "group_em": pytest.approx(100 * 2 / 3),
    }
    with pytest.raises(ValueError, match="group_em needs a group for each of 5 rows"):
        score(["group_em"], answers, gold)


# splits


@pytest.mark.parametrize(
    ("name", "train", "validation", "expected"),
    [
        ("boolq", 9_427, 3_270, (9_427, 1_635, 1_635)),
        ("cb", 250, 56, (250, 28, 28)),
        ("copa", 400, 100, (400, 50, 50)),
        ("multirc", 27_243, 4_848, (26_243, 1_000, 4_848)),
        ("wic", 5_428, 638, (5_428, 319, 319)),
        ("wsc", 554, 104, (554, 52, 52)),
        ("superglue-rte", 2_490, 277, (2_490, 138, 139)),
        ("squad", 87_599, 10_570, (86_599, 1_000, 10_570)),
        ("squad2", 130_319, 11_873, (129_319, 1_000, 11_873)),
    ],
)
def test_the_published_sizes_split_by_reads_rule(
    name: str, train: int, validation: int, expected: tuple[int, int, int]
) -> None:
    plan = plan_splits(
        load_task(name).splits,
        {"train": train, "validation": validation},
        LimitConfig(),
        where=name,
    )
    assert tuple(len(part.rows) for part in plan.values()) == expected


@pytest.mark.parametrize("train", [900, 12_000])
def test_groups_of_any_size_are_never_torn_apart(train: int) -> None:
    draw = np.random.default_rng(0)
    groups = {
        split: np.repeat(np.arange(size), draw.integers(1, 9, size))[:size]
        for split, size in (("train", train), ("validation", 400))
    }
    plan = plan_splits(
        SplitConfig(),
        {split: len(g) for split, g in groups.items()},
        LimitConfig(train=100),
        where="t",
        groups=groups,
    )
    there = {
        name: {(part.source, int(g)) for g in groups[part.source][part.rows]}
        for name, part in plan.items()
    }
    assert not (
        there["train"] & there["validation"]
        or there["train"] & there["test"]
        or there["validation"] & there["test"]
    )
    assert 92 < len(plan["train"].rows) <= 100
    for part in plan.values():
        whole = np.isin(groups[part.source], np.unique(groups[part.source][part.rows]))
        assert whole.sum() == len(part.rows)


def test_a_limit_below_one_group_is_refused() -> None:
    groups = {"train": np.zeros(50, dtype=np.int64), "validation": np.arange(20)}
    with pytest.raises(DataError, match=r"limit\.train is 4, less than a single group"):
        plan_splits(
            SplitConfig(),
            {"train": 50, "validation": 20},
            LimitConfig(train=4),
            where="t",
            groups=groups,
        )


# files


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("rte", {"metrics": ["pearson"]}, "metric pearson does not fit classes; use accuracy"),
        (
            "stsb",
            {"metrics": ["accuracy"]},
            r"metric accuracy does not fit numbers \(label.range\); use pearson",
        ),
        ("mnli", {"metrics": ["f1"]}, "there are 3 label.words; use macro_f1"),
        ("rte", {"metrics": ["group_em"]}, "metric group_em needs group"),
        ("rte", {"metrics": ["em"]}, "metrics.0.*got 'em'"),
        ("copa", {"metrics": ["f1"]}, "metrics.0: .*'accuracy', got 'f1'"),
        ("squad", {"metrics": ["accuracy"]}, "metrics.0: .*'em' or 'token_f1', got 'accuracy'"),
        ("multirc", {"pair": None}, "an encoder reads two texts at most"),
        ("multirc", {"pair": ["{paragraph}", "{question}"]}, "pair uses .* but inputs are"),
        ("copa", {"choices": ["choice1", "choice2", "choice3"]}, "text_to_text uses"),
        ("copa", {"stem": "{premise}"}, "stem uses .'premise'., but inputs are"),
        ("copa", {"label": {"words": ["a", "b", "c"]}}, "expected one for each of choices"),
        ("squad", {"inputs": ["question"]}, "inputs"),
        (
            "acceptability",
            {"splits": {"rule": "named", "validation": "train", "test": "test"}},
            "splits overlap: train, validation and test are",
        ),
    ],
)
def test_what_a_file_may_not_say(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_task({**load_task(name).model_dump(mode="json"), **changes}, where="f")


def test_a_task_without_the_new_keys_is_stored_as_before() -> None:
    """Trials are known by the hash of what their task says: a key that is not used must not be in it."""
    assert set(load_task("rte").model_dump(mode="json")) == {
        "name", "description", "source", "version", "data", "inputs", "metrics", "headline", "splits", "kind", "label", "text_to_text",
    }  # fmt: skip


# marks


@pytest.mark.parametrize(
    ("row", "marked"),
    [
        (
            ("Mark told Pete many lies about himself.", "Mark", 0, "himself", 6),
            "* Mark * told Pete many lies about # himself #.",
        ),
        (("it is it that it hit", "it", 2, "it", 4), "it is * it * that # it # hit"),
        (
            ("He told the king of his land.", "king of his land", 3, "his", 5),
            "He told the * king of # his # land *.",
        ),
        (
            ("The old man saw it", "old man", 1, "it", 9),
            "The * old man * saw # it #",
        ),  # a number beyond the words
    ],
)
def test_wsc_marks_noun_and_pronoun_where_they_stand(row: tuple[Any, ...], marked: str) -> None:
    code = load_code(task_paths()["wsc"])
    names = ("text", "span1_text", "span1_index", "span2_text", "span2_index")
    made = code.convert(
        {**dict(zip(names, row, strict=True)), "label": 1}, ["text", "label"], where="row 0"
    )
    assert made == {"text": marked, "label": 1}


def test_wsc_refuses_a_span_that_is_not_in_the_text() -> None:
    row = {
        "text": "It is.",
        "span1_text": "he",
        "span1_index": 0,
        "span2_text": "It",
        "span2_index": 0,
        "label": 0,
    }
    with pytest.raises(
        ConfigError,
        match=r"wsc.py:\d+: rows\(\), row 7: ValueError: 'he' does not stand in 'It is.'",
    ):
        load_code(task_paths()["wsc"]).convert(row, ["text", "label"], where="row 7")
