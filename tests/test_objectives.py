"""What models of each family read and answer, with real tokenizers and tiny real models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers import BertConfig as Bert

from suite.backbones.base import Kind
from suite.backbones.loading import Head
from suite.config.task import TaskConfig, load_task
from suite.config.task_base import LabelConfig
from suite.config.training import TrainingConfig
from suite.data.label_words import LabelWords
from suite.data.make_objective import make_objective
from suite.data.objective import Objective
from suite.errors import IncompatibleError
from tests.toy import learn

RTE = {
    "sentence1": ["It rains.", "It is dry, and has been so for days."],
    "sentence2": ["It is wet.", "It rains."],
    "label": [0, 1],
}
STSB = {"sentence1": ["a b", "c"], "sentence2": ["a", "d"], "label": [3.87, 0.0]}
CONFIGS = {
    "encoder": Bert(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
    ),
    "encoder-decoder": T5Config(
        vocab_size=384,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_heads=4,
        num_layers=2,
        decoder_start_token_id=0,
    ),
    "decoder": GPT2Config(
        vocab_size=384,
        n_embd=32,
        n_head=4,
        n_layer=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    ),
    "llama": LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    ),
}
ALL = [("encoder", "head"), ("encoder-decoder", "text"), ("decoder", "head"), ("decoder", "text")]


def objective(
    kind: Kind, of: str | TaskConfig = "rte", *, decoder: str = "head", **training: Any
) -> Objective:
    of = load_task(of) if isinstance(of, str) else of
    settings = {"target_max_length": 16, **training}
    return make_objective(
        of,
        kind=kind,
        tokenizer=ByT5Tokenizer(),
        training=TrainingConfig(**settings),
        decoder_objective=decoder,
    )  # type: ignore[arg-type]


def as_rows(features: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [
        dict(zip(features, values, strict=True)) for values in zip(*features.values(), strict=True)
    ]


def batch_of(goal: Objective, columns: Mapping[str, list[Any]]) -> dict[str, torch.Tensor]:
    return goal.collate(as_rows(goal.encode(columns)))


def model_for(goal: Objective, config: str, *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if goal.head.kind == "text":
        auto = AutoModelForSeq2SeqLM if config == "encoder-decoder" else AutoModelForCausalLM
        return auto.from_config(CONFIGS[config]).eval()
    config_with_head = CONFIGS[config].from_dict(
        {**CONFIGS[config].to_dict(), "num_labels": goal.head.num_labels, "problem_type": None}
    )
    return AutoModelForSequenceClassification.from_config(config_with_head).eval()


def read(ids: list[int]) -> str:
    return ByT5Tokenizer().decode([i for i in ids if i >= 0], skip_special_tokens=True)


def test_an_encoder_reads_the_pair_and_a_decoder_the_prompt() -> None:
    assert read(objective("encoder").encode(RTE)["input_ids"][0]) == "It rains.It is wet."
    assert (
        read(objective("decoder").encode(RTE)["input_ids"][0])
        == "rte sentence1: It rains. sentence2: It is wet."
    )


def test_text_to_text_is_t5s_prompt_and_label_word() -> None:
    features = objective("encoder-decoder").encode(RTE)
    assert read(features["input_ids"][0]) == "rte sentence1: It rains. sentence2: It is wet."
    assert [read(labels) for labels in features["labels"]] == ["entailment", "not_entailment"]
    assert features["units"] == [
        len("entailment") + 1,
        len("not_entailment") + 1,
    ]  # bytes and the end token


def test_decoder_text_has_loss_on_the_label_alone() -> None:
    features = objective("decoder", decoder="text").encode(RTE)
    assert read(features["input_ids"][1]).endswith("sentence2: It rains. answer: not_entailment")
    assert read([token for token in features["labels"][1] if token != -100]) == " not_entailment"
    assert features["units"][1] == sum(token != -100 for token in features["labels"][1])


@pytest.mark.parametrize(("kind", "decoder"), ALL)
def test_features_tell_gold_length_and_units(kind: Kind, decoder: str) -> None:
    features = objective(kind, decoder=decoder).encode(RTE)
    assert features["gold"] == [0, 1]
    assert features["length"] == [len(ids) for ids in features["input_ids"]]
    assert features["units"] == (
        [1, 1] if kind == "encoder" or (kind, decoder) == ("decoder", "head") else features["units"]
    )
    assert set(map(len, features.values())) == {2}


@pytest.mark.parametrize(("kind", "decoder"), ALL)
@pytest.mark.parametrize("max_length", [64, 100])
def test_batches_are_padded_to_eight_and_never_beyond_the_limit(
    kind: Kind, decoder: str, max_length: int
) -> None:
    long = {"sentence1": ["word " * 50, "x"], "sentence2": ["other " * 50, "y"], "label": [0, 1]}
    batch = batch_of(objective(kind, decoder=decoder, max_length=max_length), long)
    assert set(batch) <= {"input_ids", "attention_mask", "token_type_ids", "labels"}
    length = batch["input_ids"].shape[1]
    assert length <= max_length and (length % 8 == 0 or length == max_length)
    assert batch["attention_mask"].sum(1).tolist() == [
        int(n) for n in (batch["input_ids"] != 0).sum(1)
    ]


def test_a_long_prompt_loses_its_end_but_not_the_cue_or_the_label() -> None:
    long = {"sentence1": ["word " * 50], "sentence2": ["other " * 50], "label": [1]}
    features = objective("decoder", decoder="text", max_length=64).encode(long)
    assert features["length"][0] <= 64
    assert read(features["input_ids"][0]).endswith(" answer: not_entailment")


@pytest.mark.parametrize(
    ("kind", "decoder", "config"),
    [("encoder", "head", "encoder"), ("encoder-decoder", "text", "encoder-decoder"), ("decoder", "head", "decoder"),
     ("decoder", "head", "llama"), ("decoder", "text", "decoder"), ("decoder", "text", "llama")],
)  # fmt: skip
def test_every_family_learns_two_rows_and_says_so(kind: Kind, decoder: str, config: str) -> None:
    """The loop: collate, loss, backward, predict; labels do not influence the answer."""
    goal = objective(kind, decoder=decoder)
    model = model_for(goal, config)
    batch = batch_of(goal, RTE)
    learn(model, batch)
    with torch.no_grad():
        assert goal.predict(model, batch, synced=False) == [0.0, 1.0]
        other = batch_of(goal, {**RTE, "label": [1, 0]})
        assert goal.predict(model, other, synced=False) == [0.0, 1.0]


def test_a_regression_head_learns_its_numbers() -> None:
    goal = objective("encoder", "stsb")
    assert goal.head == Head("regression", 1)
    model = model_for(goal, "encoder")
    batch = batch_of(goal, STSB)
    assert batch["labels"].dtype == torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    with torch.no_grad():
        # 100 steps of Adam do not converge fully; the two golds are 3.87 apart
        assert goal.predict(model, batch, synced=False) == pytest.approx([3.87, 0.0], abs=0.3)


@pytest.mark.parametrize("config", ["decoder", "llama"])
def test_label_scores_are_the_models_own_log_likelihoods(config: str) -> None:
    """The model's loss is the mean over label tokens, so loss times tokens is the negative of the score."""
    goal = objective("decoder", decoder="text")
    model = model_for(goal, config)
    for label in (0, 1):
        losses = []
        for row in range(2):
            one = {name: [values[row]] for name, values in {**RTE, "label": [label, label]}.items()}
            features = goal.encode(one)
            with torch.no_grad():
                losses.append(
                    float(model(**goal.collate(as_rows(features))).loss) * features["units"][0]
                )
        prompts = [
            ids[: len(ids) - len(goal.labels[label])]
            for ids in goal.encode({**RTE, "label": [label, label]})["input_ids"]
        ]  # type: ignore[attr-defined]
        with torch.no_grad():
            scores = goal._score(model, prompts, goal.labels[label], torch.device("cpu"))  # type: ignore[attr-defined]
        assert scores.tolist() == pytest.approx([-loss for loss in losses], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "decoder", "config"),
    [
        ("encoder-decoder", "text", "encoder-decoder"),
        ("decoder", "text", "decoder"),
        ("encoder", "head", "encoder"),
    ],
)
def test_answers_survive_prompt_tuning_and_lora(kind: Kind, decoder: str, config: str) -> None:
    goal = objective(kind, decoder=decoder)
    batch = batch_of(goal, RTE)
    types = {
        "encoder-decoder": TaskType.SEQ_2_SEQ_LM,
        "decoder": TaskType.CAUSAL_LM,
        "encoder": TaskType.SEQ_CLS,
    }
    targets = {"encoder-decoder": ["q", "v"], "decoder": ["c_attn"], "encoder": ["query", "value"]}
    for peft in (
        PromptTuningConfig(task_type=types[kind], num_virtual_tokens=3),
        LoraConfig(task_type=types[kind], r=2, target_modules=targets[kind]),
    ):
        model = get_peft_model(model_for(goal, config), peft).eval()
        with torch.no_grad():
            assert torch.isfinite(model(**batch).loss)
            assert all(
                answer in (-1.0, 0.0, 1.0) for answer in goal.predict(model, batch, synced=False)
            )
    if (
        kind != "encoder-decoder"
    ):  # LoRA is the identity at the start, so the answers are the backbone's
        with torch.no_grad():
            assert goal.predict(model, batch, synced=False) == goal.predict(
                model_for(goal, config), batch, synced=False
            )


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.87, "3.8"), (3.91, "4.0"), (0.0, "0.0"), (5.0, "5.0"), (2.5, "2.4"), (0.1, "0.0")],
)
def test_numbers_are_rounded_to_the_step_as_in_t5(value: float, text: str) -> None:
    assert LabelWords(load_task("stsb").label, ByT5Tokenizer(), where="stsb").text(value) == text


@pytest.mark.parametrize(
    ("low", "high", "step", "value", "text", "texts"),
    [
        (0.5, 3, 1, 0.5, "0.5", ["0.5", "1.5", "2.5"]),
        (1, 5, 0.5, 3.3, "3.5", [f"{1 + i / 2:.1f}" for i in range(9)]),
        (-1, 1, 1, -1, "-1.0", ["-1.0", "0.0", "1.0"]),
        (0, 5, 3, 5, "3.0", ["0.0", "3.0"]),
        (0, 0.3, 0.1, 0.3, "0.3", ["0.0", "0.1", "0.2", "0.3"]),
    ],
)
def test_steps_begin_at_the_low_end_and_stay_in_the_range(
    low: float, high: float, step: float, value: float, text: str, texts: list[str]
) -> None:
    words = LabelWords(LabelConfig(range=[low, high], step=step), ByT5Tokenizer(), where="t")
    assert (words.text(value), words.texts()) == (text, texts)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3.8", 3.8),
        (" 4 ", 4.0),
        ("9.5", 5.0),
        ("-2", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("", 0.0),
        ("good", 0.0),
    ],
)
def test_written_numbers_are_clipped_and_nonsense_is_the_low_end(
    written: str, value: float
) -> None:
    assert (
        LabelWords(load_task("stsb").label, ByT5Tokenizer(), where="stsb").value(written) == value
    )


@pytest.mark.parametrize(
    ("written", "value"),
    [("entailment", 0), (" not_entailment", 1), ("not_entail", -1), ("", -1), ("Entailment", -1)],
)
def test_a_text_that_is_no_label_is_minus_one(written: str, value: int) -> None:
    assert LabelWords(load_task("rte").label, ByT5Tokenizer(), where="rte").value(written) == value


def test_all_numbers_of_stsb_can_be_written() -> None:
    texts = LabelWords(load_task("stsb").label, ByT5Tokenizer(), where="stsb").texts()
    assert (len(texts), texts[0], texts[-1]) == (26, "0.0", "5.0")


def test_a_label_longer_than_the_target_is_refused() -> None:
    with pytest.raises(
        IncompatibleError, match=r"target_max_length is 8, but label 'not_entailment' has 15 tokens"
    ):
        objective("encoder-decoder", target_max_length=8)


def test_no_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="max_length 20 leaves no room"):
        objective("decoder", decoder="text", max_length=20)
    # a fast tokenizer cuts nothing where its own tokens do not fit
    with pytest.raises(IncompatibleError, match=r"max_length is 2, .*; set it to at least 3"):
        objective("encoder", max_length=2)
    pair = {"sentence1": ["word"], "sentence2": ["other"], "label": [1]}
    assert objective("encoder", max_length=3).encode(pair)["length"] == [3]


def test_regression_as_decoder_text_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="use decoder_objective: head"):
        objective("decoder", "stsb", decoder="text")


def test_labels_that_read_alike_are_refused() -> None:
    task = load_task("rte").model_copy(
        update={"label": load_task("rte").label.model_copy(update={"words": ["yes", "yes "]})}
    )
    with pytest.raises(IncompatibleError, match="not distinct"):
        objective("encoder-decoder", task)


def test_the_fingerprint_knows_what_the_rows_depend_on() -> None:
    base = objective("encoder").fingerprint()
    assert base == objective("encoder", batch_size=4).fingerprint()
    others = [
        objective("encoder", max_length=64),
        objective("decoder"),
        objective("encoder", "mrpc"),
        objective("encoder-decoder"),
    ]
    assert all(other.fingerprint() != base for other in others)
    bigger = make_objective(
        load_task("rte"),
        kind="encoder",
        tokenizer=ByT5Tokenizer(extra_ids=10),
        training=TrainingConfig(target_max_length=16),
        decoder_objective="head",
    )
    assert bigger.fingerprint() != base


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """One that adds no tokens of its own, and has none to end a text."""
    words = {
        word: i
        for i, word in enumerate(["[PAD]", "[UNK]", "it", "rains", "entailment", "not_entailment"])
    }
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize(
    ("task", "kind"), [("rte", "encoder-decoder"), ("multi30k-en-de", "decoder")]
)
def test_a_tokenizer_without_an_end_is_refused_where_texts_are_written(
    task: str, kind: Kind
) -> None:
    with pytest.raises(IncompatibleError, match="no token to end one; take a tokenizer that has"):
        make_objective(
            load_task(task),
            kind=kind,
            tokenizer=plain_tokenizer(),
            training=TrainingConfig(),
            decoder_objective="head",
        )


def test_an_empty_prompt_is_one_token_for_a_decoder_with_a_head() -> None:
    tokenizer = plain_tokenizer()
    tokenizer.bos_token = "it"
    goal = make_objective(
        load_task("rte").model_copy(update={"text_to_text": "{sentence1}"}),
        kind="decoder",
        tokenizer=tokenizer,
        training=TrainingConfig(),
        decoder_objective="head",
    )
    columns = {"sentence1": ["", "it rains"], "sentence2": ["", ""], "label": [0, 1]}
    assert goal.encode(columns)["input_ids"] == [[2], [2, 3]]


def test_token_types_are_kept_where_the_tokenizer_gives_them() -> None:
    words = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "it", "rains"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_input_names=names
    )
    goal = make_objective(
        load_task("rte"),
        kind="encoder",
        tokenizer=tokenizer,
        training=TrainingConfig(),
        decoder_objective="head",
    )
    before = goal.fingerprint()
    batch = batch_of(goal, {"sentence1": ["it rains"], "sentence2": ["it"], "label": [0]})
    assert batch["input_ids"].tolist() == [[1, 4, 5, 2, 4, 2, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0]]
    assert goal.fingerprint() == before  # truncation set by the call is not part of the tokenizer
