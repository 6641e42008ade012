"""Every type of the installed peft: it has a search space and trains, or is refused in one sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer

from suite.backbones.loading import Head, resolve
from suite.config.arm import Arm
from suite.config.space import load_space, peft_spaces
from suite.config.sweep import BackboneChoice
from suite.errors import ConfigError, IncompatibleError, SuiteError
from suite.petl import get_method
from suite.petl._lora_starts import CONFIGS
from suite.petl.arm import ArmCount, count, count_arm, task_head
from suite.petl.peft_method import (
    FORMS,
    OURS,
    UNUSABLE,
    UNUSABLE_OPTIONS,
    peft_types,
)
from tests.toy import Answer, Toy, logits_of, make_arm, train

# Each needs something that only a user knows: which tokens, or how many layers.
OWN_CHOICE = {"peft:trainable-tokens", "peft:adaption-prompt"}
SAME_FUNCTION = {
    "r", "lora_alpha", "lora_dropout", "bias", "lora_bias", "init_lora_weights", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "fan_in_fan_out", "trainable_token_indices", "ensure_weight_tying",
}  # fmt: skip
"""Options of LoRA that say how large it is, where it sits and how it starts."""
WITH_OTHERS = {"megatron_core", "qalora_group_size"}
"""Options that only say more of one that is refused."""
OF_STARTS = {f"{start}_config" for start in CONFIGS}
"""Options of starts that read training data (`tests/test_lora_starts.py`)."""
OTHERS: dict[str, Any] = {
    "use_dora": True,
    "use_rslora": True,
    "velora_config": {"num_groups": 2, "init_type": "random"},
    "kasa_config": {},
    "use_bdlora": {
        "target_modules_bd_a": ["query"],
        "target_modules_bd_b": ["value"],
        "nblocks": 2,
    },
}
"""Options that make another method of it, with a value that does."""


def test_every_type_has_a_search_space_or_a_reason_why_not() -> None:
    types = peft_types()
    refused = {name for name, kind in types.items() if kind in UNUSABLE}
    assert set(peft_spaces()) == set(types) - refused - OWN_CHOICE
    for name in refused:
        with pytest.raises(IncompatibleError, match="does not fit a sweep: it"):
            get_method(name)


@pytest.mark.parametrize("name", peft_spaces())
def test_the_choices_of_its_search_space_train(name: str) -> None:
    choice = load_space(name).architectures[0]
    counts = []
    refusals = []
    for backbone, head in (("minilm", Head("classification", 2)), ("gpt2", Head("text"))):
        resolved = resolve(BackboneChoice(name=backbone))
        arm = Arm(backbone=resolved.choice, method=name, architecture=choice)
        try:
            counts.append(count_arm(resolved, head, arm).method)
            break
        except SuiteError as error:
            refusals.append(str(error))
    assert counts and counts[0] > 0, refusals


def test_every_option_of_lora_is_known_and_none_is_plain_lora_under_another_name() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)} - OURS
    assert fields == SAME_FUNCTION | WITH_OTHERS | OF_STARTS | set(OTHERS) | set(UNUSABLE_OPTIONS)
    plain = trained({})
    for key, value in OTHERS.items():
        assert not torch.equal(trained({key: value}), plain), key
    for start in ("gaussian", "pissa", "olora", "orthogonal"):
        assert not torch.equal(trained({"init_lora_weights": start}), plain), start


def trained(architecture: dict[str, Any]) -> torch.Tensor:
    """Logits of a small BERT after three steps with peft's LoRA."""
    # rsLoRA's scale is LoRA's at rank 1 alone
    toy = make_arm("peft:lora", "bert", "classification", architecture={"r": 4} | architecture)
    torch.manual_seed(1)
    train(toy, steps=3)
    toy.model.eval()
    with torch.no_grad():
        return logits_of(toy.model, toy.batch(seed=9))


@pytest.mark.parametrize("key", UNUSABLE_OPTIONS)
def test_what_peft_would_not_do_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: .* does not fit a sweep: (it|the suite)"):
        get_method("peft:lora").configure({key: {"x": 1}})


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("peft:lora", {"velora_config": {"num_groups": 2}}, "init_type: got 'batch_average', exp"),
        ("peft:kasa", {"kasa_config": {"beta": 0.01}}, "beta: got 0.01, expected 0.0001, peft's"),
        ("peft:adamss", {"use_asa": True}, "use_asa: True does not fit a sweep"),
    ],
)
def test_what_peft_leaves_to_other_training_loops_is_refused(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        get_method(name).configure(options)


def test_butterfly_factors_that_peft_would_set_to_one_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As where the extension does not build.
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: None)
    resolved = resolve(BackboneChoice(name="minilm"))
    asked = {"boft_block_size": 4, "boft_n_butterfly_factor": 2}
    arm = Arm(backbone=resolved.choice, method="peft:boft", architecture=asked)
    with pytest.raises(IncompatibleError, match="boft_n_butterfly_factor: got 2, but"):
        count_arm(resolved, Head("classification", 2), arm)


@pytest.mark.parametrize("answer", ["classification", "regression"])
@pytest.mark.parametrize("name", ["peft:osf", "peft:lora", "peft:pissa"])
def test_no_target_of_pefts_lies_in_the_task_head(name: str, answer: Answer) -> None:
    # RoBERTa's head has two maps; the second has one row where the answer is a number.
    # OSF adapts all maps by default.
    architecture = {} if name == "peft:osf" else {"target_modules": "all-linear"}
    toy = make_arm(name, "roberta", answer, architecture=architecture)
    heads = tuple(f"{head}." for head in toy.family.head_names(toy.model))  # type: ignore[arg-type]
    for place, module in toy.model.named_modules():
        assert not (isinstance(module, BaseTunerLayer) and f"{place}.".startswith(heads)), place
    plain = make_arm("bitfit", "roberta", answer)
    assert counted(toy).head == counted(plain).head


def counted(toy: Toy) -> ArmCount:
    return count(toy.model, task_head(toy.model, toy.resolved))


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_lora_by_name_is_lora_with_its_option(form: str) -> None:
    method = get_method(f"peft:{form}").configure({"r": 4})
    again = get_method(f"peft:{form}").configure(method.config.model_dump())
    assert again.config == method.config, "as a stored arm gives them"
    by_option = get_method("peft:lora").configure(FORMS[form] | {"r": 4})
    assert by_option.config == method.config
