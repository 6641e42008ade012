"""Backbones without their last layers: the weights that are left are the checkpoint's, and READ-large has READ's count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig

from suite.backbones.loading import Head, build, resolve
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice
from suite.errors import ConfigError
from suite.petl.arm import count_arm
from tests.tiny import FAMILIES, tiny_choice

DEPTH = {
    "t5": {"num_layers": 3, "num_decoder_layers": 3},
    "bert": {"num_hidden_layers": 3},
    "gpt2": {"n_layer": 3},
    "llama": {"num_hidden_layers": 3},
}
HEADS = {
    "t5": Head("text"),
    "gpt2": Head("text"),
    "llama": Head("text"),
    "bert": Head("classification", 2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shortened_backbone_is_the_checkpoint_without_its_last_layers(
    family: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    whole = build(resolve(tiny_choice(family, **DEPTH[family])), HEADS[family])
    whole.save_pretrained(tmp_path)
    short = resolve(BackboneChoice(name=str(tmp_path), tokenizer="bytes", drop_layers=1))
    model = build(short, HEADS[family]).eval()
    for stack in short.family.stacks(whole):
        del stack.blocks[2:]
    ids = torch.randint(4, 200, (2, 7))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if family == "t5" else {})}
    assert [len(stack.blocks) for stack in short.family.stacks(model)] == [2] * len(
        short.family.stacks(model)
    )
    with torch.no_grad():
        options = {"use_cache": False} if family != "bert" else {}
        torch.testing.assert_close(
            model(**inputs, **options).logits,
            whole.eval()(**inputs, **options).logits,
            rtol=0,
            atol=1e-6,
        )


def test_read_large_trains_what_read_does_on_a_t5_large_of_twenty_layers() -> None:
    resolved = resolve(BackboneChoice(name="t5-large", drop_layers=4))
    assert (resolved.config.num_layers, resolved.config.num_decoder_layers) == (20, 20)
    counts = {
        recurrent: count_arm(
            resolved,
            Head("text"),
            Arm(backbone=resolved.choice, method="read", architecture={"recurrent": recurrent}),
        )
        for recurrent in (True, False)
    }
    assert (
        counts[True].method == 2_497_536
    )  # 0.32 % of the whole T5-large with a head of its own, 770,567,168 (READ, table 1)
    assert counts[False].method == 20 * 2_497_536  # 6.48 %; table 2 prints 6.4
    # a block of each
    encoder = 4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024
    decoder = 8 * 1024**2 + 2 * 1024 * 4096 + 3 * 1024
    assert counts[True].total - counts[True].method == 737_668_096 - 4 * (encoder + decoder)


def test_a_stack_keeps_at_least_one_layer_and_its_shape_is_not_given_twice() -> None:
    with pytest.raises(ConfigError, match="got drop_layers 12, but its stacks have 12 layers"):
        resolve(BackboneChoice(name="t5-base", drop_layers=12))
    with pytest.raises(ValueError, match="drop_layers shortens a checkpoint"):
        BackboneChoice(name="t5-base", config={"num_layers": 2}, drop_layers=1)


def test_whole_backbones_keep_the_names_they_had() -> None:
    """A key, and with it the folder of every trial, is a hash over the backbone as stored."""
    arm = Arm(backbone=BackboneChoice(name="minilm"), method="lora", architecture={"rank": 8})
    assert arm.key == "minilm.pretrained.lora.72fdebd0"
    short = arm.model_copy(update={"backbone": BackboneChoice(name="minilm", drop_layers=2)})
    assert short.key != arm.key
    assert Arm.model_validate_json(short.model_dump_json()) == short


def test_a_stack_that_nobody_could_build_is_refused(tmp_path: Path) -> None:
    deep = BackboneChoice(name="t5-small", tokenizer="bytes", config={"num_decoder_layers": 5400})
    with pytest.raises(ConfigError, match=r"5400 layers in a stack \(num_decoder_layers\).*500"):
        resolve(deep)
    BertConfig(num_hidden_layers=501).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="501 layers in a stack"):
        resolve(BackboneChoice(name=str(tmp_path), tokenizer="bytes"))
