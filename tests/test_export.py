"""Exported folders: each gives the trained model's answers again, through the suite and through the library it is meant for."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import yaml
from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

import suite as package
from suite.backbones.bpe import train_bpe
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.config.task import LabelTask, load_task, load_task_file
from suite.config.training import TrainingConfig
from suite.data.tokenizer import tokenizer_fingerprint
from suite.errors import BackboneError, CheckpointError, ConfigError, DataError, IncompatibleError
from suite.export import Exported, export, write
from suite.export.card import Facts
from suite.export.predict import text_columns
from suite.export.same import answers
from suite.export.same import make_batch as make_own_batch
from suite.petl import methods
from suite.record.folder import Home
from suite.train.restore import Restored, restore
from tests.commands import suite  # noqa: F401
from tests.ranks import in_processes
from tests.records import make_result, make_spec, write_trial
from tests.test_loading import SHA, hub_cache, save
from tests.test_own_data import TASK
from tests.test_restore import PRETRAIN, pretrained_arm
from tests.tiny import FAMILIES, tiny_choice
from tests.toy import logits_of, make_batch
from tests.trained import changed, trained_spec, write_trained

TOLERANCE = 1e-5
"""Folded heads and repeated ones are summed in another order."""
ROUNDING = 1e-6
"""Equal weights that lie at other addresses: kernels may sum in another order (1e-7 was seen)."""
PLAIN = {("full", f) for f in FAMILIES} | {("bitfit", "bert"), ("bitfit", "gpt2")}
PEFTS = {("lora", f) for f in FAMILIES} | {
    ("prompt", "t5"),
    ("peft:ia3", "t5"),
    ("peft:prefix-tuning", "bert"),
    ("peft:vera", "gpt2"),
}
ARMS = sorted(
    {(m, f) for m in methods.names() for f in ("t5", "bert")}
    | PLAIN
    | PEFTS
    | {("bitfit", "llama"), ("prompt", "gpt2")}
)
FORMS = {"full": "transformers", "lora": "peft", "read": "suite"}
NARROW = (
    trained_spec("read", "bert")
    .arm.model_copy(update={"architecture": {"hidden": 8}})
    .model_dump(mode="json")
)
AUTO = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForSequenceClassification}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def exported(
    home: Home, spec: Any, target: Path, *, weights: Path | None = None
) -> tuple[Restored, Exported]:
    folder, _ = write_trained(home, spec, weights=weights)
    restored = restore(folder, home)
    return restored, export(restored, target, Facts())


def test_an_export_names_files_of_rows_and_no_folder_of_this_machine(
    home: Home, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "fine,good\nawful,bad\n" * 20)
    (tmp_path / "mine.yaml").write_text(json.dumps({**TASK, "data": {"files": str(rows)}}))
    task = load_task_file(tmp_path / "mine.yaml")
    exported(home, trained_spec("lora", "bert", task=task), tmp_path / "out")
    assert str(tmp_path) not in (tmp_path / "out" / "suite.json").read_text()
    assert package.load(tmp_path / "out").predict(["fine"])[0] in ("good", "bad")


def same_answers(one: Any, other: Any, restored: Restored, *, atol: float = ROUNDING) -> None:
    batch = make_batch(restored.resolved.family, restored.objective.head, seed=3, size=3)
    expected = logits_of(one, batch)
    got = logits_of(other, batch)
    torch.testing.assert_close(got, expected, rtol=0.0, atol=atol)
    assert expected.std() > 0.01  # no two models that answer nothing


def plain_base(folder: Path, auto: Any, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = auto.from_pretrained(folder, **options)
    return model


@pytest.mark.parametrize(("method", "family"), ARMS)
def test_a_loaded_model_answers_as_the_trained_one(
    method: str, family: str, home: Home, tmp_path: Path
) -> None:
    restored, written = exported(home, trained_spec(method, family), tmp_path / "out")
    expected = "suite"
    if (method, family) in PLAIN:
        expected = "transformers"
    elif (method, family) in PEFTS:
        expected = "peft"
    assert written.description.format == expected
    with warnings.catch_warnings(record=True) as said:
        model, tokenizer = package.load(tmp_path / "out")
    assert not [str(one.message) for one in said if one.category in (FutureWarning, UserWarning)]
    same_answers(restored.model, model, restored)
    assert not model.training
    assert tokenizer("two words")["input_ids"] == restored.tokenizer("two words")["input_ids"]
    assert written.bytes == sum(
        p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file()
    )


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("lora", "bert"),
        ("lora", "gpt2"),
        ("lora", "llama"),
        ("lora", "t5"),
        ("prompt", "t5"),
        ("peft:ia3", "bert"),
    ],
)
def test_peft_alone_loads_an_adapter_with_its_task_head(
    method: str, family: str, home: Home, tmp_path: Path
) -> None:
    restored, _ = exported(home, trained_spec(method, family), tmp_path / "out")
    base = plain_base(
        tmp_path / "out" / "base", AUTO.get(family, AutoModelForSequenceClassification)
    )
    same_answers(restored.model, PeftModel.from_pretrained(base, str(tmp_path / "out")), restored)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_prompt_of_a_decoder_writes_the_same_through_peft(
    family: str, home: Home, tmp_path: Path
) -> None:
    restored, _ = exported(home, trained_spec("prompt", family, text=True), tmp_path / "out")
    theirs = PeftModel.from_pretrained(
        plain_base(tmp_path / "out" / "base", AutoModelForCausalLM), str(tmp_path / "out")
    ).eval()
    ids = torch.tensor([[11, 25, 17, 30]])
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    ours = restored.model.generate(input_ids=ids, **options)[0, -6:]  # type: ignore[operator]
    assert ours.tolist() == theirs.generate(input_ids=ids, **options)[0, -6:].tolist()
    assert "texts of equal length" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["pretrained", "gqa", "col-wgqa"])
def test_full_fine_tuning_and_folded_attention_are_plain_weights(
    attention: str, family: str, home: Home, tmp_path: Path
) -> None:
    spec = trained_spec("full", family, attention=AttentionChoice(name=attention))
    restored, written = exported(home, spec, tmp_path / "out")
    assert written.description.format == "transformers"
    theirs = plain_base(tmp_path / "out", AUTO.get(family, AutoModelForSequenceClassification))
    same_answers(restored.model, theirs, restored, atol=TOLERANCE)
    written_out = attention != "pretrained" and family != "llama"
    assert ("written out once for every query head" in written.description.note) == written_out
    if family == "llama":
        assert theirs.config.num_key_value_heads == (2 if attention == "pretrained" else 1)


def test_generation_is_the_same_after_folding(home: Home, tmp_path: Path) -> None:
    restored, _ = exported(
        home, trained_spec("full", "t5", attention=AttentionChoice(name="wgqa")), tmp_path / "out"
    )
    model, _ = package.load(tmp_path / "out")
    ids = torch.tensor([[11, 25, 17, 30], [12, 33, 40, 41]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "num_beams": 2}
    assert torch.equal(
        model.generate(input_ids=ids, **options), restored.model.generate(input_ids=ids, **options)
    )  # type: ignore[operator]


@pytest.mark.parametrize(
    ("method", "attention"),
    [
        ("lora", "wgqa"),
        ("full", "shared"),
        ("full", "window"),
        ("full", "mhe-mul"),
        ("adapter", "mhe-add"),
    ],
)
def test_what_no_library_can_hold_is_in_the_suites_format(
    method: str, attention: str, home: Home, tmp_path: Path
) -> None:
    spec = trained_spec(method, "bert", attention=AttentionChoice(name=attention))
    restored, written = exported(home, spec, tmp_path / "out")
    assert written.description.format == "suite"
    assert written.description.base == ("none" if method == "full" else "copy")
    same_answers(restored.model, package.load(tmp_path / "out").model, restored)


def test_weights_of_a_pretrain_run_go_with_the_model(home: Home, tmp_path: Path) -> None:
    spec = pretrained_arm(home)
    restored, _ = exported(home, spec, tmp_path / "out", weights=home.pretrained(PRETRAIN).weights)
    home.pretrained(PRETRAIN).weights.unlink()
    same_answers(restored.model, package.load(tmp_path / "out").model, restored)


@pytest.mark.parametrize(
    ("task", "method", "form"), [(t, m, f) for t in ("copa", "squad") for m, f in FORMS.items()]
)
def test_heads_for_choices_and_spans_come_back(
    task: str, method: str, form: str, home: Home, tmp_path: Path
) -> None:
    restored, written = exported(
        home, trained_spec(method, "bert", task=load_task(task)), tmp_path / "out"
    )
    assert written.description.format == form
    model, _ = package.load(tmp_path / "out")
    batch = make_own_batch(restored.model, restored.resolved.family, restored.objective.head)
    expected = answers(restored.model, batch)
    assert sorted(expected) == (["logits"] if task == "copa" else ["end_logits", "start_logits"])
    for name, logits in answers(model, batch).items():
        torch.testing.assert_close(logits, expected[name], rtol=0.0, atol=ROUNDING)


def test_bf16_stays_bf16(home: Home, tmp_path: Path) -> None:
    training = trained_spec("lora", "bert").training.model_copy(update={"precision": "bf16"})
    for method in ("full", "lora", "read"):
        restored, written = exported(
            home, trained_spec(method, "bert", training=training), tmp_path / method
        )
        model, _ = package.load(written.folder)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        same_answers(restored.model, model, restored)


# ---- where the base comes from -----------------------------------------------------------------------------------------


def test_a_hub_backbone_is_found_by_name_at_its_commit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = hub_cache(tmp_path / "hub", monkeypatch)
    save("bert", cached)
    backbone = BackboneChoice(name="org/tiny", tokenizer="bytes")
    for method in ("lora", "read"):
        folder, _ = write_trained(home, trained_spec(method, "bert", backbone=backbone))
        restored = restore(folder, home)
        written = export(restored, tmp_path / method, Facts(), copy_base=False)
        assert (
            written.description.base == "name"
            and written.description.base_identity["commit"] == SHA
        )
        assert not (written.folder / "base").exists()
        same_answers(restored.model, package.load(written.folder).model, restored)
    adapter = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("org/tiny", SHA)
    base = plain_base(cached, AutoModelForSequenceClassification, num_labels=2)
    same_answers(
        package.load(tmp_path / "lora").model,
        PeftModel.from_pretrained(base, str(tmp_path / "lora")),
        restored,
    )


def test_a_package_that_changed_since_is_noticed(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "export_pkg").mkdir()
    (tmp_path / "export_pkg" / "__init__.py").touch()
    # the trials are in fp32, and so must the card's base be
    save("gpt2", tmp_path / "export_pkg" / "model", dtype=torch.bfloat16)
    monkeypatch.syspath_prepend(str(tmp_path))
    backbone = BackboneChoice(name="package:export_pkg/model", tokenizer="bytes")
    restored, written = exported(
        home, trained_spec("adapter", "gpt2", backbone=backbone), tmp_path / "out"
    )
    assert written.description.base == "name"
    same_answers(restored.model, package.load(tmp_path / "out").model, restored)
    lora, _ = exported(home, trained_spec("lora", "gpt2", backbone=backbone), tmp_path / "lora")
    adapter = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "package:export_pkg/model"
    monkeypatch.chdir(tmp_path)
    same_answers(lora.model, run_card(tmp_path / "lora")["model"], lora)
    assert "\nbase_model: package:export_pkg/model\n" in (tmp_path / "lora/README.md").read_text()
    # by its name the base would come back with all its layers
    short = backbone.model_copy(update={"drop_layers": 1})
    fewer, written = exported(home, trained_spec("lora", "gpt2", backbone=short), tmp_path / "few")
    assert written.description.base == "copy"
    same_answers(fewer.model, run_card(tmp_path / "few")["model"], fewer)
    weights = tmp_path / "export_pkg" / "model" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(BackboneError, match="install the version that it was trained with"):
        package.load(tmp_path / "out")


def test_a_folder_goes_with_the_model_and_its_path_does_not(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save("bert", tmp_path / "elsewhere" / "backbone")
    backbone = BackboneChoice(name=str(tmp_path / "elsewhere" / "backbone"), tokenizer="bytes")
    for method in ("lora", "read", "full"):
        restored, written = exported(
            home, trained_spec(method, "bert", backbone=backbone), Path(method)
        )
        for path in (p for p in written.folder.rglob("*") if p.is_file()):
            assert str(tmp_path).encode() not in path.read_bytes(), path
        same_answers(restored.model, package.load(written.folder).model, restored)


def test_a_tokenizer_comes_back_as_it_was(home: Home, tmp_path: Path) -> None:
    """For the models of some families transformers takes another class than that of the tokenizer."""
    train_bpe(["A man sleeps. He doesn't rest, hello world 123"] * 50, 300).save_pretrained(
        str(tmp_path / "bpe")
    )
    backbone = tiny_choice("qwen2", vocab_size=384).model_copy(
        update={"tokenizer": str(tmp_path / "bpe")}
    )
    restored, _ = exported(
        home, trained_spec("full", "qwen2", backbone=backbone, text=True), tmp_path / "out"
    )
    loaded = package.load(tmp_path / "out").tokenizer
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(restored.tokenizer)


def test_random_weights_do_not_depend_on_who_draws_them(home: Home, tmp_path: Path) -> None:
    """The frozen backbone was drawn from the trial's seed; a loader on another version of torch would draw another one."""
    exported(home, trained_spec("read", "t5"), tmp_path / "out")
    torch.manual_seed(1)
    first, _ = package.load(tmp_path / "out")
    torch.manual_seed(2)
    second, _ = package.load(tmp_path / "out")
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


# ---- the folder --------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_something_is_left_alone(home: Home, tmp_path: Path) -> None:
    folder, _ = write_trained(home, trained_spec("lora", "bert"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export(restore(folder, home), tmp_path / "out", Facts())
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_link_to_an_empty_folder_is_filled_and_stays_a_link(home: Home, tmp_path: Path) -> None:
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    exported(home, trained_spec("lora", "bert"), tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "out" / "suite.json").exists()


def test_a_model_whose_answers_do_not_come_back_is_not_written(home: Home, tmp_path: Path) -> None:
    folder, _ = write_trained(home, trained_spec("read", "bert"))
    restored = restore(folder, home)
    classifier: nn.Module = restored.model.get_submodule("classifier")
    classifier.register_forward_hook(
        lambda module, args, output: output + 1.0
    )  # what no folder can hold
    with pytest.raises(CheckpointError, match="does not give the trained model's answers"):
        export(restored, tmp_path / "deep" / "out", Facts())
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda d: (d / "suite.json").unlink(), ConfigError, "holds no suite.json"),
        (
            lambda d: (d / "suite.json").write_text('{"schema_version": 1}'),
            ConfigError,
            "is not readable",
        ),
        (lambda d: edited(d, schema_version=2), ConfigError, "got schema version 2, expected 1"),
        (
            lambda d: (d / "trained.safetensors").write_bytes(b"cut"),
            CheckpointError,
            "cannot be read",
        ),
        (lambda d: edited(d, arm=NARROW), CheckpointError, "expected the tensors of this model"),
    ],
)
def test_a_spoilt_folder_says_what_is_wrong(
    spoil: Any, error: type[Exception], message: str, home: Home, tmp_path: Path
) -> None:
    exported(home, trained_spec("read", "bert"), tmp_path / "out")
    spoil(tmp_path / "out")
    with pytest.raises(error, match=message):
        package.load(tmp_path / "out")


def edited(folder: Path, **fields: Any) -> None:
    path = folder / "suite.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_card_says_what_is_known_and_that_the_rest_is_not(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = write_trained(home, trained_spec("lora", "bert"))
    facts = Facts(
        seed_scores={"1": 81.5, "2": 82.5},
        score_mean=82.0,
        score_std=0.707,
        interval=(80.0, 84.0),
        interval_of="seeds x items",
    )
    export(restore(folder, home), tmp_path / "out", facts)
    text = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    result = folder.result()
    assert result is not None and result.score is not None
    assert front["license"] == "unknown" and front["library_name"] == "peft"
    # no checkpoint is the base of random weights
    assert "base_model" not in front
    assert front["model-index"][0]["results"][0]["metrics"] == [
        {"type": "accuracy", "value": pytest.approx(result.score, abs=1e-4)}
    ]
    assert (
        "Over seeds 1, 2: 82.00 ± 0.71 (standard deviation), 95% interval 80.00 to 84.00 (over seeds x items)."
        in text
    )
    assert "Wh (cpu-time-estimate), 21.0 s" in text
    assert "50,000 were trained" in text
    assert f"best of {len(result.epochs)} epochs" in text


def test_the_card_of_a_last_epoch_says_so_and_what_it_was_scored_in(
    home: Home, tmp_path: Path
) -> None:
    spec = trained_spec("lora", "bert")
    training = spec.training.model_copy(update={"keep": "last", "patience": None})
    folder, _ = write_trained(home, spec.model_copy(update={"training": training}))
    restored = restore(folder, home)
    result = restored.result.model_copy(update={"precision": "bf16-autocast"})
    export(replace(restored, result=result), tmp_path / "out", Facts())
    text = (tmp_path / "out" / "README.md").read_text()
    assert f"last of {len(result.epochs)} epochs" in text and "best of" not in text
    assert "- Scored in bf16-autocast; the weights are fp32" in text


def run_card(folder: Path) -> dict[str, Any]:
    """Names that the card's lines leave behind; all blocks run as they are written."""
    scope: dict[str, Any] = {}
    blocks = (folder / "README.md").read_text().split("```python\n")[1:]
    for block in blocks:
        exec(block.split("```")[0], scope)
    scope["blocks"] = len(blocks)
    return scope


@pytest.mark.parametrize(
    ("method", "family", "task", "blocks"),
    [
        ("lora", "bert", "mrpc", 3),
        ("bitfit", "bert", "wsc", 3),
        # peft puts no shared weights into the model of a pipeline
        ("peft:vera", "bert", "mrpc", 2),
        ("lora", "gpt2", "sst2", 2),
        ("prompt", "t5", "cb", 2),
        ("read", "t5", "multi30k-en-de", 1),
    ],
)
def test_the_cards_lines_run_as_they_are_written(
    method: str,
    family: str,
    task: str,
    blocks: int,
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = trained_spec(method, family, task=load_task(task))
    folder = tmp_path / 'o"u\\x'
    restored, _ = exported(home, spec, folder)
    # the card calls the folder by its name alone, whose path is one of this machine
    monkeypatch.chdir(tmp_path)
    left = run_card(folder)
    assert left["blocks"] == blocks
    model = left["model"] if blocks > 1 else left["model"].model
    same_answers(restored.model, model.eval(), restored)
    if "classify" in left:
        answers_of_suite, answers_of_pipeline = capsys.readouterr().out.splitlines()[:2]
        assert answers_of_suite.strip("[]") in answers_of_pipeline


# ---- answers ------------------------------------------------------------------------------------

ROWS = {
    "sst2": {"sentence": ["a fine film", "dull " * 30], "label": [1, 0]},
    "stsb": {"sentence1": ["one text", "two"], "sentence2": ["another", "2"], "label": [1.0, 4.2]},
    "copa": {
        "premise": ["it rained", "he fell"],
        "question": ["cause", "effect"],
        "choice1": ["clouds came", "he got up"],
        "choice2": ["sun", "it was a long way down"],
        "label": [0, 1],
    },
    "squad": {
        "question": ["who came", "what fell"],
        "context": ["Ann came by", "at noon the old tree fell down " * 3],
        "texts": [["Ann"], ["tree"]],
        "starts": [[0], [16]],
    },
    "multi30k-en-de": {"en": ["a dog runs", "two men"], "de": ["ein Hund", "zwei"]},
    "gsm8k": {"question": ["1 + 1?", "3 apples, 1 eaten?"], "answer": ["#### 2", "#### 2"]},
}
"""Rows of tasks, answers included: a trial has them, whoever asks a model has not."""
ASKED = [
    ("sst2", "full", "bert"),
    ("sst2", "lora", "t5"),
    ("sst2", "lora", "gpt2"),
    ("sst2", "lora", "llama"),
    ("stsb", "read", "modernbert"),
    ("stsb", "full", "t5"),
    ("copa", "adapter", "bert"),
    ("copa", "lora", "gpt2"),
    ("squad", "lora", "bert"),
    ("squad", "full", "gpt2"),
    ("multi30k-en-de", "lora", "t5"),
    ("gsm8k", "full", "llama"),
    ("gsm8k", "prompt", "gpt2"),
]


@pytest.mark.parametrize(("task", "method", "family"), ASKED)
def test_predict_answers_as_the_trials_evaluation_does(
    task: str, method: str, family: str, home: Home, tmp_path: Path
) -> None:
    config = load_task(task)
    spec = trained_spec(method, family, task=config, text=family == "gpt2")
    restored, written = exported(home, spec, tmp_path / "out")
    rows = ROWS[task]
    expected = evaluated(restored, rows)
    if isinstance(config, LabelTask) and config.label.words is not None:
        expected = [config.label.words[int(each)] if each >= 0 else None for each in expected]
    names = text_columns(config)
    texts = list(zip(*(rows[name] for name in names), strict=True))
    loaded = package.load(tmp_path / "out")
    got = loaded.predict(texts, batch_size=1)
    # a batch of one has less padding, so that sums may end in another digit
    assert got == (pytest.approx(expected, abs=TOLERANCE) if task == "stsb" else expected)
    assert loaded.predict([dict(zip(names, text, strict=True)) for text in texts]) == (
        pytest.approx(got, abs=TOLERANCE) if task == "stsb" else got
    )
    assert written.description.reading is not None
    assert written.description.reading.task == config


def evaluated(restored: Restored, rows: dict[str, list[Any]]) -> list[Any]:
    """What the loop's evaluation makes of rows with their answers, in one batch."""
    objective = restored.objective
    (part,) = objective.features([(["0", "1"], rows)], "test")
    data = Dataset.from_dict(part)
    with torch.no_grad():
        batch = objective.collate_eval(list(data))
        answers = objective.predict(restored.model, batch, synced=False)
    return objective.merge(data, answers).predictions


def three_numbers(_number: int, folders: list[str]) -> tuple[list[list[float]], str]:
    """What exported models answer in a process that nobody has told where to log, and its stderr."""
    with redirect_stderr(io.StringIO()) as said:
        found = [package.load(folder).predict([("one text", "another")] * 3) for folder in folders]
    return found, said.getvalue()


def test_numbers_outside_of_the_labels_range_are_counted_on_stderr_and_stay_as_they_are(
    home: Home, tmp_path: Path
) -> None:
    task = load_task("stsb")
    folders = []
    # An untrained head gives numbers around zero.
    for low, high in ((-9.0, 9.0), (4.0, 5.0)):
        label = task.label.model_copy(update={"range": [low, high]})
        own = task.model_copy(update={"label": label})
        folders.append(str(tmp_path / f"from-{low:g}"))
        exported(home, trained_spec("lora", "bert", task=own), Path(folders[-1]))
    (((inside, outside), said),) = in_processes(three_numbers, folders)
    assert inside == pytest.approx(outside, abs=TOLERANCE)
    assert all(-9.0 < number < 4.0 for number in outside)
    assert said.splitlines() == [
        "stsb: 3 of 3 answers lie outside of 4 to 5, the range of the task's labels"
    ]


def test_a_language_model_gives_a_perplexity_and_an_instructed_one_a_response(
    home: Home, tmp_path: Path
) -> None:
    windows = TrainingConfig(max_length=16, stride=8)
    task = load_task("ptb")
    restored, _ = exported(
        home, trained_spec("full", "gpt2", task=task, training=windows), tmp_path / "lm"
    )
    text = "a few words and no more"
    (part,) = restored.objective.features([(["0"], {"sentence": [text]})], "test")
    with torch.no_grad():
        batch = restored.objective.collate_eval(list(Dataset.from_dict(part)))
        nll = restored.objective.predict(restored.model, batch, synced=False)
    expected = restored.objective.score(nll, part["gold"])["perplexity"]
    got = package.load(tmp_path / "lm").predict([text, "", text])
    assert got == [pytest.approx(expected), None, pytest.approx(expected)]
    for family in ("gpt2", "t5"):
        exported(
            home,
            trained_spec("full", family, task=load_task("alpaca"), text=True),
            tmp_path / family,
        )
        responses = package.load(tmp_path / family).predict([("add", "1 and 2"), ("greet", "")])
        assert len(responses) == 2 and all(isinstance(each, str) for each in responses)


def test_texts_that_the_task_does_not_read_are_refused(home: Home, tmp_path: Path) -> None:
    exported(home, trained_spec("lora", "bert", task=load_task("mrpc")), tmp_path / "out")
    loaded = package.load(tmp_path / "out")
    assert loaded.predict([]) == []
    wrong: Any
    table = pandas.DataFrame({"sentence1": ["a"], "sentence2": ["b"]})
    for wrong in ("a text", {"sentence1": "a", "sentence2": "b"}, None, table):
        with pytest.raises(DataError, match=r"predict: got \w+, expected a list of texts"):
            loaded.predict(wrong)
    rows = [("a", "b"), ("c", "d")]
    assert loaded.predict(row for row in rows) == loaded.predict(rows)
    assert loaded.predict(pandas.Series(rows)) == loaded.predict(rows)
    for wrong in ([None], ["a text"], [("a", "b", "c")], [{"sentence1": "a"}], [("a", None)]):
        with pytest.raises(DataError, match="expected 2: sentence1, sentence2"):
            loaded.predict(wrong)
    edited(tmp_path / "out", reading=None)
    with pytest.raises(ConfigError, match="does not say how the model reads"):
        package.load(tmp_path / "out").predict([("a", "b")])


PLAIN_LIBRARIES = """
import json, sys
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer, pipeline

pairs = json.loads(sys.argv[1])
found = {}
for folder in sys.argv[2:]:
    classify = pipeline("text-classification", folder, truncation=True, top_k=None)
    rows = [{"text": one, "text_pair": other} for one, other in pairs]
    found[folder] = [classify(row) for row in rows]
    if "folded" in folder:
        continue
    model = AutoPeftModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, (one, other) in zip(found[folder], pairs):
        best = model(**tokenizer(one, other, truncation=True, return_tensors="pt")).logits.argmax()
        assert model.config.id2label[int(best)] == row[0]["label"], folder
assert "suite" not in sys.modules
print(json.dumps(found))
"""
"""A program of somebody who has transformers and peft alone."""


def test_plain_libraries_give_the_suites_predictions_in_a_fresh_process(
    home: Home, tmp_path: Path
) -> None:
    task = load_task("mnli")
    gqa = AttentionChoice(name="gqa")
    made = {
        "folded": exported(
            home, trained_spec("full", "bert", task=task, attention=gqa), tmp_path / "folded"
        ),
        "lora": exported(home, trained_spec("lora", "bert", task=task), tmp_path / "lora"),
    }
    folder, _ = write_trained(home, trained_spec("peft:loha", "bert", task=task))
    loha = restore(folder, home)
    made["as-lora"] = loha, export(loha, tmp_path / "as-lora", Facts(), lora=True)
    adapter = json.loads((tmp_path / "as-lora" / "adapter_config.json").read_text())
    assert adapter["peft_type"] == "LORA" and adapter["rank_pattern"]
    texts = [("a man sleeps", "he rests"), ("two dogs run", "no"), ("a long text " * 20, "x")]
    places = [str(tmp_path / name) for name in made]
    command = [sys.executable, "-c", PLAIN_LIBRARIES, json.dumps(texts), *places]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    by_folder = json.loads(done.stdout.splitlines()[-1])
    words = task.label.words
    answered = set()
    for place, (restored, _) in zip(places, made.values(), strict=True):
        assert package.load(place).predict(texts) == [row[0]["label"] for row in by_folder[place]]
        for text, row in zip(texts, by_folder[place], strict=True):
            encoded = restored.tokenizer(*text, truncation=True, max_length=48, return_tensors="pt")
            with torch.no_grad():
                chances = restored.model(**encoded).logits.softmax(-1)[0].tolist()
            scores = {each["label"]: each["score"] for each in row}
            assert [scores[word] for word in words] == pytest.approx(chances, abs=TOLERANCE)
            answered.add(row[0]["label"])
    assert len(answered) > 1


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("peft:ia3", "do not support LoRA conversion"),
        ("peft:dora", "it computes more than a low-rank product"),
        ("peft:pissa", "its start changed the base"),
        ("read", "is no adapter of peft"),
    ],
)
def test_what_is_no_lora_is_not_written_as_one(
    method: str, reason: str, home: Home, tmp_path: Path
) -> None:
    folder, _ = write_trained(home, trained_spec(method, "bert"))
    with pytest.raises(IncompatibleError, match=reason):
        export(restore(folder, home), tmp_path / "out", Facts(), lora=True)
    assert not (tmp_path / "out").exists()


def test_a_converted_type_on_transposed_maps_is_the_same_lora(home: Home, tmp_path: Path) -> None:
    folder, _ = write_trained(home, trained_spec("peft:vera", "gpt2"))
    restored = restore(folder, home)
    export(restored, tmp_path / "out", Facts(), lora=True)
    same_answers(restored.model, package.load(tmp_path / "out").model, restored, atol=1e-4)


# ---- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cell(home: Home) -> Home:
    """A searched cell with three confirmed runs; seed 2 is the best on validation, seed 3 on test."""
    for seed, validation, test in ((1, 0.7, 0.7), (2, 0.9, 0.6), (3, 0.8, 0.95)):
        spec = trained_spec("lora", "bert", seed=seed, sweep="demo")
        folder, _ = write_trained(home, spec)
        changed(folder, validation_score=validation, score=test, test_score=test)
    search = make_spec("full").model_copy(
        update={"arm": spec.arm, "learning_rate": spec.learning_rate, "world_size": 1}
    )
    write_trial(home, search, make_result(search))
    return home


def test_the_command_takes_the_run_that_validation_prefers(
    cell: Home,
    tmp_path: Path,
    suite: Any,  # noqa: F811
) -> None:
    code, out, err = suite("export", "lora/agreement", tmp_path / "out", "--home", cell.path)
    assert code == 0, err
    assert "peft format" in out and "seed 2" in out
    assert json.loads((tmp_path / "out" / "suite.json").read_text())["seed"] == 2
    code, out, err = suite(
        "export", "lora", tmp_path / "three", "--home", cell.path, "--seed", 3, "--as-lora"
    )
    assert code == 0 and json.loads((tmp_path / "three" / "suite.json").read_text())["seed"] == 3, (
        err
    )
    assert "Over seeds 1, 2, 3" in (tmp_path / "three" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lora", "out", "--seed", "4"), "no confirmed run with seed 4; it has seeds [1, 2, 3]"),
        (("lorra", "out"), "did you mean lora"),
        (("lora", "home"), "exists and is not empty"),
    ],
)
def test_mistakes_end_with_a_message(
    arguments: tuple[str, ...],
    message: str,
    cell: Home,
    tmp_path: Path,
    suite: Any,  # noqa: F811
) -> None:
    name, target, *rest = arguments
    code, _, err = suite("export", name, tmp_path / target, "--home", cell.path, *rest)
    assert code == 2 and message in err
    assert not (tmp_path / "out").exists()


def test_a_signal_while_it_writes_leaves_no_part_of_a_folder(
    cell: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suite: Any,  # noqa: F811
) -> None:
    def stopped(_model: Restored, folder: Path) -> None:
        assert any(folder.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(write, "_write_tokenizer", stopped)
    before = sorted(tmp_path.iterdir())
    code, _, err = suite("export", "lora/agreement", tmp_path / "out", "--home", cell.path)
    assert (code, err) == (143, "stopped by SIGTERM\n")
    assert sorted(tmp_path.iterdir()) == before


def test_a_cell_without_a_confirmed_run_says_what_is_missing(
    home: Home,
    tmp_path: Path,
    suite: Any,  # noqa: F811
) -> None:
    spec = make_spec("lora")
    write_trial(home, spec, make_result(spec))
    code, _, err = suite("export", "lora/agreement", tmp_path / "out", "--home", home.path)
    assert code == 2
    assert (
        "no confirmed run to export; it has 1 search trials and 0 ended confirm runs" in err
        and "suite run" in err
    )
    confirm = make_spec("lora", seed=1)
    write_trial(home, confirm, make_result(confirm))
    home.trial(confirm.hash).best.unlink(missing_ok=True)
    code, _, err = suite("export", "lora/agreement", tmp_path / "out", "--home", home.path)
    assert code == 2 and "1 confirm runs have a score, and their weights" in err
