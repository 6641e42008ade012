"""A trained model taken up again from its folder, without data; what was changed since is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from suite.backbones.bpe import train_bpe
from suite.backbones.loading import Head, build, load_tokenizer, resolve
from suite.config.hashing import short_hash
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.config.training import TrainingConfig
from suite.data.tokenizer import tokenizer_fingerprint
from suite.errors import BackboneError, CheckpointError, ConfigError, SuiteError
from suite.files import sha256
from suite.petl import methods
from suite.petl.arm import trained_state
from suite.record.folder import Home
from suite.record.result import Status
from suite.record.spec import Phase, TrialSpec
from suite.train.restore import open_trained, restore
from tests.records import make_result, make_spec
from tests.test_loading import save
from tests.tiny import FAMILIES, tiny_choice
from tests.toy import logits_of, make_batch
from tests.trained import changed, same_weights, trained_spec, write_trained

ARMS = [(method, FAMILIES[i % 4]) for i, method in enumerate(methods.names())] + [
    ("lst", "t5"),
    ("read", "t5"),
    ("peft:vera", "bert"),
]
PRETRAIN = "0123456789abcdef"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.mark.parametrize(("method", "family"), ARMS)
def test_the_model_is_the_one_that_was_trained_bit_for_bit(
    method: str, family: str, home: Home
) -> None:
    folder, trained = write_trained(home, trained_spec(method, family))
    torch.manual_seed(99)  # nothing may depend on the generator's state
    restored = restore(folder, home)
    assert same_weights(restored.model, trained)
    batch = make_batch(restored.resolved.family, restored.objective.head, seed=0, size=3)
    # equal weights at other addresses: kernels may sum in another order
    torch.testing.assert_close(
        logits_of(restored.model, batch), logits_of(trained, batch), rtol=0.0, atol=1e-6
    )
    assert not restored.model.training
    assert restored.tokenizer.pad_token_id == restored.resolved.config.pad_token_id


def test_a_trial_in_bf16_comes_back_in_bf16(home: Home) -> None:
    spec = trained_spec("lora", "bert", training=TrainingConfig(max_length=48, precision="bf16"))
    folder, trained = write_trained(home, spec)
    restored = restore(folder, home)
    assert {p.dtype for p in restored.model.parameters()} == {torch.bfloat16}
    assert same_weights(restored.model, trained)


def test_a_trial_comes_back_in_what_it_computed_in_whatever_auto_is_here(home: Home) -> None:
    spec = trained_spec("lora", "bert", training=TrainingConfig(max_length=48))
    folder, trained = write_trained(home, spec)
    result = folder.result()
    assert result is not None
    # As of a GPU without bf16; a host without a GPU takes "auto" there for bf16.
    there = {"precision": "fp32", "provenance": result.provenance | {"device": "cuda"}}
    folder.write_result(result.model_copy(update=there))
    assert same_weights(restore(folder, home).model, trained)


def test_pretrained_weights_are_part_of_it(home: Home) -> None:
    spec = pretrained_arm(home)
    folder, trained = write_trained(home, spec, weights=home.pretrained(PRETRAIN).weights)
    restored = restore(folder, home)
    assert same_weights(restored.model, trained)
    home.pretrained(PRETRAIN).weights.write_bytes(b"")
    with pytest.raises(CheckpointError, match="lost or changed"):
        restore(folder, home)


def pretrained_arm(home: Home) -> TrialSpec:
    """A READ arm on a converted backbone whose weights come from a pretrain run."""
    attention = AttentionChoice(name="mhe-mul")
    _, model = write_trained(home, trained_spec("full", "t5", attention=attention))
    folder = home.pretrained(PRETRAIN)
    folder.path.mkdir(parents=True)
    save_file(
        {name: tensor.clone() for name, tensor in trained_state(model).items()}, folder.weights
    )
    folder.write_result(make_result(make_spec(), weights_sha256=sha256(folder.weights)))
    spec = trained_spec("read", "t5", attention=attention)
    return spec.model_copy(update={"arm": spec.arm.model_copy(update={"pretrain": PRETRAIN})})


def test_frozen_weights_of_another_origin_are_refused(home: Home, tmp_path: Path) -> None:
    save("bert", tmp_path / "backbone")
    backbone = BackboneChoice(name=str(tmp_path / "backbone"), tokenizer="bytes")
    folder, _ = write_trained(home, trained_spec("lora", "bert", backbone=backbone))
    restore(folder, home)
    torch.manual_seed(8)
    build(resolve(tiny_choice("bert")), Head("classification", 2)).base_model.save_pretrained(
        tmp_path / "backbone"
    )
    with pytest.raises(
        CheckpointError, match=r"frozen weights of .* are not those that the trial had"
    ):
        restore(folder, home)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: folder.best.unlink(),
            "a confirm trial without weights, expected a finished trial",
        ),
        (
            lambda folder: (folder.path / "result.json").unlink(),
            "a confirm trial that has not ended",
        ),
        (lambda folder: (folder.path / "spec.json").unlink(), "got no trial"),
        (
            lambda folder: changed(folder, status=Status.DIVERGED, score=None),
            "a trial that ended diverged",
        ),
        (lambda folder: folder.best.write_bytes(b"cut off"), "not the trained tensors"),
        (
            lambda folder: save_file({"other": torch.ones(1)}, folder.best),
            "not the trained tensors.*missing",
        ),
        (
            lambda folder: changed(folder, provenance={"tokenizer_sha256": "0"}),
            "tokenizer bytes is not the one",
        ),
    ],
)
def test_what_is_not_a_whole_confirmed_trial_says_what_is_missing(
    spoil: object, message: str, home: Home
) -> None:
    folder, _ = write_trained(home, trained_spec("lora", "bert"))
    spoil(folder)  # type: ignore[operator]
    with pytest.raises(SuiteError, match=message):
        restore(folder, home)


def test_one_flipped_bit_in_the_trained_tensors_is_noticed(home: Home) -> None:
    folder, _ = write_trained(home, trained_spec("lora", "bert"))
    changed(folder, weights_sha256=sha256(folder.best))
    restore(folder, home)
    content = bytearray(folder.best.read_bytes())
    content[-1] ^= 1  # of the last weight: the file can still be read
    folder.best.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"best\.safetensors: not the trained tensors of this trial: got SHA-256 .* again",
    ):
        restore(folder, home)


def test_a_search_trial_kept_no_weights(home: Home) -> None:
    folder, _ = write_trained(home, trained_spec("lora", "bert", phase=Phase.SEARCH))
    folder.best.unlink()
    with pytest.raises(
        ConfigError, match=r"a search trial without weights.*search trials keep no weights"
    ):
        restore(folder, home)


def test_a_tokenizer_trained_for_the_backbone_is_found_in_the_home(home: Home) -> None:
    for name, texts in (
        ("old", ["one text"] * 9),
        ("new", ["another text, that has other words"] * 9),
    ):
        train_bpe(texts, 270).save_pretrained(
            home.cache / "tokenizers" / f"bpe-270-entailment-{short_hash(name)}"
        )
    folders = {short_hash(name): name for name in ("old", "new")}
    spec = trained_spec(
        "lora",
        "t5",
        backbone=tiny_choice("t5").model_copy(update={"tokenizer": "bpe:270:entailment"}),
    )
    for part, name in folders.items():
        trained = resolve(
            spec.arm.backbone, tokenizer=home.cache / "tokenizers" / f"bpe-270-entailment-{part}"
        )
        wanted = tokenizer_fingerprint(load_tokenizer(trained))
        resolved, tokenizer = open_trained(
            spec, make_result(spec, provenance={"tokenizer_sha256": wanted}), home
        )
        assert (
            resolved.tokenizer == trained.tokenizer and tokenizer_fingerprint(tokenizer) == wanted
        ), name
    with pytest.raises((CheckpointError, BackboneError), match="is not the one that trial"):
        open_trained(spec, make_result(spec, provenance={"tokenizer_sha256": "0"}), home)
