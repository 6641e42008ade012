"""Generation: prompts and targets, learnt texts come back, padding changes nothing, scores are over the whole corpus."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import sacrebleu
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import ByT5Tokenizer, T5Tokenizer

from suite.backbones.loading import Head, build, resolve
from suite.config.sweep import LimitConfig
from suite.config.training import TrainingConfig
from suite.data.generation import GenerationObjective
from suite.data.make_objective import make_objective
from suite.data.prepare import prepare
from suite.data.tokenizer import as_written
from suite.errors import DataError, IncompatibleError
from suite.metrics.text import score_texts
from suite.petl import get_method
from tests.test_objectives import as_rows, read
from tests.texts import PAIRS, toy_translation, write_pairs
from tests.tiny import tiny_choice

KINDS = {"t5": "encoder-decoder", "gpt2": "decoder", "llama": "decoder"}
TWO = {"en": ["the cat sees the dog that found it", "a dog"], "de": ["Katze sieht", "Hund"]}
WRITTEN = [
    "the cat sat on the mat today",
    "a dog",
    "birds were singing in the old tree",
    "it rains",
]
GOLDS = [
    "the cat is on the mat today",
    "a dog barks",
    "birds sang in the very old tree",
    "it rains",
]


def objective(family: str, **training: Any) -> GenerationObjective:
    settings = TrainingConfig(**{"max_length": 64, "target_max_length": 24, **training})
    options: Any = {
        "kind": KINDS.get(family, family),
        "tokenizer": ByT5Tokenizer(),
        "training": settings,
    }
    goal = make_objective(toy_translation(), **options, decoder_objective="head")
    assert isinstance(goal, GenerationObjective)
    return goal


def learnt(
    goal: GenerationObjective, family: str, columns: dict[str, list[str]], **shape: int
) -> Any:
    """A tiny model that has learnt the rows by heart."""
    torch.manual_seed(0)
    model = build(resolve(tiny_choice(family, **shape)), Head("text"))
    batch = goal.collate(as_rows(goal.encode(columns)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(400):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        if loss.item() < 0.02:
            return model.eval()
    raise AssertionError(f"the loss is still {loss.item()}")


@functools.cache
def _learnt_two(family: str) -> Any:
    return learnt(objective(family), family, TWO)


def learnt_two(family: str) -> Any:
    """A model of its own that has learnt `TWO`; it is trained once, which takes seconds."""
    return copy.deepcopy(_learnt_two(family))


def test_an_encoder_decoder_reads_the_prompt_and_writes_the_target() -> None:
    features = objective("t5").encode(TWO)
    assert read(features["input_ids"][1]) == "translate: a dog"
    assert read(features["labels"][1]) == features["gold"][1] == "Hund"
    assert features["units"] == [len("Katze sieht") + 1, len("Hund") + 1]


def test_a_decoder_has_its_loss_on_the_target_and_the_end_token() -> None:
    features = objective("gpt2").encode(TWO)
    assert read(features["input_ids"][1]) == "translate: a dog answer: Hund"
    assert read([token for token in features["labels"][1] if token != -100]) == " Hund"
    assert features["units"][1] == len(" Hund") + 1


def test_long_prompts_and_targets_are_cut_and_keep_their_ends() -> None:
    long = {"en": ["word " * 60], "de": ["Wort " * 60]}
    goal = objective("gpt2", max_length=40, target_max_length=10)
    features = goal.encode(long)
    prompt = [
        i
        for i, label in zip(features["input_ids"][0], features["labels"][0], strict=True)
        if label == -100
    ]
    assert len(prompt) == 40 and read(prompt).endswith(" answer:")
    assert features["units"] == [10] and features["labels"][0][-1] == ByT5Tokenizer().eos_token_id
    assert features["gold"] == long["de"], "the reference is never cut"
    assert goal.collate(as_rows(features))["input_ids"].shape[1] <= goal.positions == 50
    labels = objective("t5", target_max_length=10).encode(long)["labels"][0]
    assert len(labels) == 10 and labels[-1] == ByT5Tokenizer().eos_token_id


@pytest.mark.parametrize("family", KINDS)
def test_learnt_texts_come_back_alone_and_beside_longer_rows_greedily_and_with_beams(
    family: str,
) -> None:
    """A decoder's shorter prompt is padded on the left, which must change nothing; labels do not influence the answer."""
    model = learnt_two(family)
    wrong = [
        {**row, "gold": ""}
        for row in as_rows(objective(family).encode({**TWO, "de": ["x", "yyyyyyyy"]}))
    ]
    for beams in (1, 3):
        goal = objective(family, beams=beams)
        with torch.no_grad():
            assert goal.predict(model, goal.collate(wrong), synced=False) == TWO["de"]
            assert goal.predict(model, goal.collate(wrong[1:]), synced=False) == TWO["de"][1:]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_left_padding_changes_no_token(family: str) -> None:
    """Also for a model with random weights, whose answers hang on every logit."""
    torch.manual_seed(3)
    goal = objective(family)
    model: Any = build(resolve(tiny_choice(family)), Head("text")).eval()
    columns = {
        "en": [en + " and more" * i for i, (en, _) in enumerate(PAIRS[:4])],
        "de": [de for _, de in PAIRS[:4]],
    }
    rows = as_rows(goal.encode(columns))

    def tokens(chosen: list[Any]) -> list[list[int]]:
        inputs = goal._inputs(goal.collate(chosen))
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        return goal._answers(model.generate(**inputs, **options), inputs).tolist()  # type: ignore[no-any-return]

    with torch.no_grad():
        assert tokens(rows) == [tokens([row])[0] for row in rows]


def test_no_more_is_written_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build(resolve(tiny_choice("gpt2")), Head("text")).eval()
    asked = []
    whole = model.generate
    monkeypatch.setattr(
        model,
        "generate",
        lambda **options: asked.append(options["max_new_tokens"]) or whole(**options),
    )
    for training in ({"target_max_length": 10}, {"target_max_length": 10, "max_new_tokens": 3}):
        goal = objective("gpt2", **training)
        rows = as_rows(goal.encode({"en": [PAIRS[0][0]], "de": [PAIRS[0][1]]}))
        goal.predict(model, goal.collate(rows), synced=False)
    assert asked == [10, 3]


def test_a_decoder_needs_positions_for_all_that_it_may_write() -> None:
    lengths = {"max_length": 64, "target_max_length": 10}
    for longest, positions in ((3, 74), (30, 94)):
        goal = objective("gpt2", **lengths, max_new_tokens=longest)
        assert (goal.positions, goal.trained_positions) == (positions, 74)


def test_a_decoder_deeper_than_its_encoder_writes() -> None:
    goal = objective("t5", beams=2)
    model = learnt(goal, "t5", TWO, num_layers=1, num_decoder_layers=3)
    batch = goal.collate(as_rows(goal.encode(TWO)))
    with torch.no_grad():
        assert goal.predict(model, batch, synced=False) == TWO["de"]


@pytest.mark.parametrize("method", ["full", "peft:ia3"])
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_a_checkpoints_own_settings_change_no_text(family: str, method: str) -> None:
    """Neither its penalties nor its ends; they are the model's again when the text is there."""
    goal = objective(family)
    model = written = learnt_two(family)
    if method != "full":
        # peft's wrapper asks the model inside, and starts as an identity
        arm = get_method(method).configure({})
        model = arm.attach(written, resolve(tiny_choice(family)).family)
    batch = goal.collate(as_rows(goal.encode(TWO)))
    written.generation_config.update(
        repetition_penalty=5.0,
        no_repeat_ngram_size=1,
        length_penalty=-9.0,
        min_new_tokens=20,
        eos_token_id=[ord("a") + 3, ord("t") + 3],
    )
    before = written.generation_config.to_dict()
    with torch.no_grad():
        assert goal.predict(model, batch, synced=False) == TWO["de"]
    assert written.generation_config.to_dict() == before


def test_no_checkpoints_tokenizer_tidies_what_was_written() -> None:
    letters = [(letter, -3.0) for letter in "▁abcdefghijklmnopqrstuvwxyz'.,?"]
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tidy = T5Tokenizer(vocab=specials + letters, extra_ids=0, clean_up_tokenization_spaces=True)
    text = "it 's a , b . do n't ?"
    ids = tidy(text)["input_ids"]
    assert tidy.decode(ids, skip_special_tokens=True) == "it's a, b. don't?"
    assert as_written(tidy, ids) == text


def test_bleu_and_rouge_are_the_libraries_over_the_whole_corpus() -> None:
    found = score_texts(["bleu", "rouge1", "rouge2", "rougeL"], WRITTEN, GOLDS)
    assert found["bleu"] == sacrebleu.corpus_bleu(WRITTEN, [GOLDS]).score
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    rows = [scorer.score(gold, text) for gold, text in zip(GOLDS, WRITTEN, strict=True)]
    for name in ("rouge1", "rouge2", "rougeL"):
        assert found[name] == pytest.approx(100 * fmean(row[name].fmeasure for row in rows))
    halves = [sacrebleu.corpus_bleu(WRITTEN[i : i + 2], [GOLDS[i : i + 2]]).score for i in (0, 2)]
    assert abs(fmean(halves) - found["bleu"]) > 1, "the mean over batches is another number"


def test_a_perfect_translation_scores_100_and_nonsense_0() -> None:
    assert score_texts(["bleu", "rougeL"], GOLDS, GOLDS) == {
        "bleu": pytest.approx(100.0),
        "rougeL": pytest.approx(100.0),
    }
    assert score_texts(["bleu", "rouge2"], ["zz"] * 4, GOLDS) == {"bleu": 0.0, "rouge2": 0.0}
    with pytest.raises(ValueError, match="1 texts for 4 references"):
        score_texts(["bleu"], ["a"], GOLDS)


def test_the_signature_of_bleu_is_kept() -> None:
    found = objective("t5").signatures()
    assert (
        found["bleu"]
        == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    )
    assert "porter" in found["rouge1"]


def test_nested_columns_are_read_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    root = write_pairs(tmp_path / "data", train=6, validation=3, test=3)
    goal = objective("t5")
    data = prepare(goal.task, goal, limit=LimitConfig(), data_root=root, cache=tmp_path / "cache")
    assert [row["gold"] for row in data.split("train", confirm=False)] == [
        de for _, de in PAIRS[:6]
    ]
    other = toy_translation(
        data={"hub": "toy/pairs", "columns": {"en": "translation.en", "de": "translation.fr"}}
    )
    with pytest.raises(DataError, match=r"column 'translation' .* holds no fr"):
        prepare(other, goal, limit=LimitConfig(), data_root=root, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("family", "training", "says"),
    [
        ("encoder", {}, "an encoder backbone cannot write text"),
        ("gpt2", {"max_length": 8}, "leaves no room"),
        ("gpt2", {"target_max_length": 1}, "leaves no room"),
    ],
)
def test_what_cannot_be_written_is_refused(
    family: str, training: dict[str, Any], says: str
) -> None:
    with pytest.raises(IncompatibleError, match=says):
        objective(family, **training)
