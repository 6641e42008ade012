"""Prompt tuning: trained vectors in front of the embedded input.

Source: Lester et al., arXiv 2104.08691, section 2; the parameters and their configuration are peft's (`PromptEmbedding`).
    READ (arXiv 2305.15348, table 8): 20 vectors. Initial values are the first rows of the vocabulary, and T5 gets the prompt
    on its encoder only: the official code of LST (arXiv 2206.06522), there with 100 vectors.
Deviations:
    - The vectors are inserted by hooks on the stack, not by peft's model classes, because those (0.21) pool wrongly under a
      prompt: a GPT-2 or Llama classifier reads its last position, which is padding in a right-padded batch, and BERT's pooler
      reads the first prompt vector instead of [CLS]; and they drop `position_ids` in generation, so that an answer depends on
      how far its batch was padded. Where none of this matters (T5; unpadded decoders) the logits equal peft's: a test.
    - The outputs of encoder-only and decoder-only backbones leave out the prompt's positions, so that logits and labels keep
      the input's length. T5's decoder attends to the encoder's prompt positions.
    - With absolute positions (BERT, GPT-2) the prompt takes positions 0 to length - 1 and the text moves up.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import torch
from peft import PeftConfig, PromptTuningConfig, TaskType
from peft.tuners.prompt_tuning import PromptEmbedding
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.backbones.base import Family, Stack
from suite.errors import IncompatibleError
from suite.petl.base import Architecture, Method, freeze


class PromptArchitecture(Architecture):
    """Hyperparameters of prompt tuning."""

    length: Annotated[int, Field(ge=1)] = Field(
        20, description="vectors in front of the input (READ table 8: 20)"
    )
    init: Literal["vocab", "random"] = Field(
        "vocab", description="first rows of the vocabulary (LST's code), or standard normal (peft)"
    )


class Prompt(Method[PromptArchitecture]):
    description = "trained vectors in front of the embedded input"
    source = "Lester et al., arXiv 2104.08691, section 2; READ, arXiv 2305.15348, table 8"
    aliases = ("prompt-tuning",)
    Config = PromptArchitecture

    def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
        freeze(model)
        first, *rest = family.stacks(model)
        first.module.add_module("prompt", self._prompt(first))
        first.module.register_forward_pre_hook(_prepend, with_kwargs=True)
        if family.kind == "encoder":  # BERT's pooler is inside the stack and must find [CLS] first
            first.blocks[-1].register_forward_hook(_Strip(self.config.length))
        elif family.kind == "decoder":
            first.module.register_forward_hook(_strip_stack, with_kwargs=True)
        for stack in rest:
            stack.module.register_forward_pre_hook(
                _WidenCrossMask(self.config.length), with_kwargs=True
            )
        return model

    def extra_positions(self) -> int:
        return self.config.length

    def peft_config(self, model: nn.Module, family: Family) -> PeftConfig | None:
        """None for heads, which peft's classes let read the wrong position."""
        known = cast(PreTrainedModel, model)
        if family.kind == "encoder" or family.head_names(known):
            return None
        task = TaskType.SEQ_2_SEQ_LM if family.kind == "encoder-decoder" else TaskType.CAUSAL_LM
        return PromptTuningConfig(
            task_type=task, num_virtual_tokens=self.config.length, num_transformer_submodules=1
        )

    def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
        """length x d."""
        return self.config.length * family.stacks(model)[0].width

    def _prompt(self, stack: Stack) -> nn.Module:
        words = stack.module.get_input_embeddings()  # type: ignore[operator]
        config = PromptTuningConfig(
            num_virtual_tokens=self.config.length,
            token_dim=stack.width,
            num_transformer_submodules=1,
            prompt_tuning_init="RANDOM",
        )
        with torch.device(words.weight.device):
            prompt: Any = PromptEmbedding(config, words)
        prompt.to(words.weight.dtype)
        if self.config.init == "vocab":
            if words.num_embeddings < self.config.length:
                raise IncompatibleError(
                    f"prompt: length {self.config.length} exceeds the vocabulary's {words.num_embeddings} rows"
                )
            prompt.embedding.weight.data.copy_(words.weight.data[: self.config.length])
        module: nn.Module = prompt
        return module


def _prepend(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the input ids by the prompt and their embeddings; in cached generation only in the first call."""
    assert len(args) <= 1, "stacks take everything but input_ids by name"
    kwargs = {**kwargs, **({"input_ids": args[0]} if args else {})}
    length = module.prompt.embedding.num_embeddings
    if kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = _widened(kwargs["attention_mask"], length)
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = kwargs["position_ids"] + length
    cache = kwargs.get("past_key_values")
    if (
        cache is not None and cache.get_seq_length() > 0
    ):  # the prompt's keys and values are in the cache
        return (), kwargs
    words = kwargs.get("inputs_embeds")
    words = (
        module.get_input_embeddings()(kwargs.pop("input_ids")) if words is None else words
    )  # (B, T, d)
    _check_room(module, length, words.shape[1])
    prompt = module.prompt(torch.arange(length, device=words.device)).to(words.dtype)  # (L, d)
    kwargs["inputs_embeds"] = torch.cat(
        [prompt.expand(len(words), -1, -1), words], dim=1
    )  # (B, L + T, d)
    if kwargs.get("position_ids") is not None:
        own = torch.arange(length, device=words.device).expand(len(kwargs["position_ids"]), -1)
        kwargs["position_ids"] = torch.cat([own, kwargs["position_ids"]], dim=1)
    if kwargs.get("token_type_ids") is not None:
        kwargs["token_type_ids"] = torch.cat(
            [kwargs["token_type_ids"].new_zeros(len(words), length), kwargs["token_type_ids"]],
            dim=1,
        )
    return (), kwargs


def _widened(mask: Tensor, length: int) -> Tensor:
    """(B, T) -> (B, L + T): the prompt is never masked."""
    return torch.cat([mask.new_ones(len(mask), length), mask], dim=1)


def _check_room(module: Any, length: int, tokens: int) -> None:
    """Positions end somewhere in backbones with a table of them; say so in place of an index error."""
    positions = getattr(module.config, "max_position_embeddings", None)
    if positions is not None and length + tokens > positions:
        raise IncompatibleError(
            f"prompt: {length} vectors and {tokens} tokens of input exceed the backbone's {positions} positions; lower training.max_length"
        )


def _strip_stack(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Drop the prompt's positions from a decoder's output, if this call had them (`_prepend` then passes embeddings)."""
    if kwargs.get("inputs_embeds") is not None:
        output.last_hidden_state = output.last_hidden_state[
            :, module.prompt.embedding.num_embeddings :
        ]
    return output


class _Strip:
    """Hook on a block: drop the first `length` positions of its output."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output[:, self.length :]


class _WidenCrossMask:
    """Hook on a decoder stack: its encoder's output is `length` positions longer than the mask it is given."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("encoder_attention_mask")
        return args, kwargs if mask is None else {
            **kwargs,
            "encoder_attention_mask": _widened(mask, self.length),
        }
