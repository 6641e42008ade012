"""Prompt tuning: trained vectors in front of the embedded input.

Source: Lester et al., arXiv 2104.08691, section 2; the parameters and their configuration are
    peft's (`PromptEmbedding`). READ (arXiv 2305.15348, table 8): 20 vectors. Initial values are the
    first rows of the vocabulary, and T5 gets the prompt on its encoder only: the official code of
    LST (arXiv 2206.06522), there with 100 vectors.
Deviations:
    - The vectors are inserted by hooks on the stack, not by peft's model classes, because those
      (0.21) pool wrongly under a prompt: a GPT-2 or Llama classifier reads its last position, which
      is padding in a right-padded batch, and BERT's pooler reads the first prompt vector instead of
      [CLS]; and they drop `position_ids` in generation, so that an answer depends on how far its
      batch was padded. Where none of this matters (T5; unpadded decoders) the logits equal peft's:
      a test.
    - The outputs of encoder-only and decoder-only backbones leave out the prompt's positions, so
      that logits and labels keep the input's length. T5's decoder attends to the encoder's prompt
      positions.
    - With absolute positions (BERT, GPT-2) the prompt takes positions 0 to length - 1 and the text
      moves up.
    - In a batch padded on the left the prompt stands between padding and text, not before both.

Shapes: B rows, T tokens of the input, P vectors of the prompt, d width.
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
        prompt: Any = self._prompt(first)
        prompt.positions = family.positions(model.config)
        first.module.add_module("prompt", prompt)
        first.module.register_forward_pre_hook(_prepend, with_kwargs=True)
        if family.kind == "encoder":
            # after the last block: BERT's pooler is inside the stack and must find [CLS] first
            first.blocks[-1].register_forward_hook(_Strip(self.config.length))
        elif family.kind == "decoder":
            first.module.register_forward_hook(_strip_stack, with_kwargs=True)
        for stack in rest:
            widen = _WidenCrossMask(self.config.length)
            stack.module.register_forward_pre_hook(widen, with_kwargs=True)
        return model

    def extra_positions(self) -> int:
        return self.config.length

    def peft_config(self, model: nn.Module, family: Family) -> PeftConfig | None:
        """The peft configuration; None for heads, because peft's read the wrong position."""
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
            prompt_tuning_init="RANDOM",  # "TEXT" would load a tokenizer
        )
        with torch.device(words.weight.device):
            prompt: Any = PromptEmbedding(config, words)
        prompt.to(words.weight.dtype)
        if self.config.init == "vocab":
            if words.num_embeddings < self.config.length:
                raise IncompatibleError(
                    f"prompt: length {self.config.length} exceeds the vocabulary's"
                    f" {words.num_embeddings} rows"
                )
            first = torch.arange(self.config.length, device=words.weight.device)
            # through the module, because Gemma's scales what it looks up
            prompt.embedding.weight.data.copy_(words(first).detach())
        module: nn.Module = prompt
        return module


def _prepend(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the input ids by the prompt and their embeddings.

    In generation with a cache, only the first call gets the prompt.
    """
    assert len(args) <= 1, "stacks take everything but input_ids by name"
    kwargs = dict(kwargs)
    if args:
        kwargs["input_ids"] = args[0]
    length = module.prompt.embedding.num_embeddings
    mask = kwargs.get("attention_mask")  # (B, T)
    if mask is not None:
        kwargs["attention_mask"] = _widened(mask, length)
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = kwargs["position_ids"] + length
    cache = kwargs.get("past_key_values")
    # later calls of generate: the prompt's keys and values are in the cache
    if cache is not None and cache.get_seq_length() > 0:
        return (), kwargs
    words = kwargs.get("inputs_embeds")  # (B, T, d)
    if words is None:
        words = module.get_input_embeddings()(kwargs.pop("input_ids"))
    _check_room(module, words.shape[1])
    numbers = torch.arange(length, device=words.device)  # (P,)
    prompt = module.prompt(numbers).to(words.dtype).expand(len(words), -1, -1)  # (B, P, d)
    kwargs["inputs_embeds"] = _insert(prompt, words, mask)  # (B, P + T, d)
    if kwargs.get("position_ids") is not None:
        positions = kwargs["position_ids"]
        own_positions = numbers.expand(len(positions), -1)
        kwargs["position_ids"] = _insert(own_positions, positions, mask)
    if kwargs.get("token_type_ids") is not None:
        types = kwargs["token_type_ids"]
        own_types = types.new_zeros(len(words), length)
        kwargs["token_type_ids"] = _insert(own_types, types, mask)
    return (), kwargs


def _insert(prompt: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
    """Put (B, P, ...) in front of (B, T, ...), behind the padding on its left.

    A window (Gemma) counts places, and padding in between would push the prompt out of it.
    """
    joined = torch.cat([prompt, text], dim=1)  # (B, P + T, ...)
    if mask is None or len(prompt) != len(mask):
        return joined
    length = prompt.shape[1]
    padding = (mask.cumsum(1) == 0).sum(1, keepdim=True)  # (B, 1)
    places = torch.arange(joined.shape[1], device=joined.device).expand(len(joined), -1)
    source = torch.where(places < padding + length, places - padding, places)
    source = torch.where(places < padding, places + length, source)
    rows = torch.arange(len(joined), device=joined.device)[:, None]
    return joined[rows, source]


def _widened(mask: Tensor, length: int) -> Tensor:
    """Widen (B, T) to (B, P + T): the prompt is never masked."""
    return _insert(mask.new_ones(len(mask), length), mask, mask)


def _check_room(module: Any, tokens: int) -> None:
    """Check that prompt and input fit into a backbone's table of positions, if it has one.

    Without this check torch raises an index error, or fails inside of a GPU kernel.
    """
    positions = module.prompt.positions
    length = module.prompt.embedding.num_embeddings
    if positions is not None and length + tokens > positions:
        raise IncompatibleError(
            f"prompt: {length} vectors and {tokens} tokens of input exceed the backbone's"
            f" {positions} positions; lower training.max_length"
        )


def _strip_stack(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Drop the prompt's positions from a decoder's output, if this call had them."""
    # _prepend passes embeddings where it adds the prompt, and ids where it does not
    if kwargs.get("inputs_embeds") is not None:
        length = module.prompt.embedding.num_embeddings
        output.last_hidden_state = output.last_hidden_state[:, length:]
    return output


# the two hooks below are classes and no closures, so that a model with them can be pickled


class _Strip:
    """Hook on a block that drops the first `length` positions of its output."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        # DeBERTa's blocks return a tuple
        if isinstance(output, tuple):
            return output[0][:, self.length :], *output[1:]
        return output[:, self.length :]


class _WidenCrossMask:
    """Hook on a decoder stack that widens the encoder's mask by the prompt's positions.

    The encoder's output has them, but the mask comes from the batch.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("encoder_attention_mask")
        if mask is None:
            return args, kwargs
        return args, {**kwargs, "encoder_attention_mask": _widened(mask, self.length)}
