"""An arm in use: a forward pass without gradients, and decoding token by token with a cache.

It runs on one device with whole weights.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel, PeftType
from torch import Tensor, nn

from suite.attention import variants
from suite.attention._cache import cache_bytes
from suite.backbones.base import Family
from suite.backbones.weights import cast_weights
from suite.profiling.arms import ArmChoice
from suite.profiling.batches import forward_options, random_ids, training_batch
from suite.profiling.clock import LiveBytes, repeated
from suite.profiling.estimate import DTYPES, vocabulary_of
from suite.profiling.record import NO_DECODING, Decoding, Inference, Spread
from suite.profiling.setting import Setting


class Serving:
    """An arm in evaluation mode, its attention folded as it would be served.

    The method's own modules stay as they were trained.

    Args:
        arm: The arm to use.
        setting: Shapes and precision.
        device: Where the model lives.
    """

    def __init__(self, arm: ArmChoice, setting: Setting, device: torch.device) -> None:
        self.setting = setting
        self.device = device
        self._bytes = LiveBytes(device)  # before the model, so that it counts
        torch.manual_seed(0)
        resolved = arm.resolve()
        self.family = resolved.family
        model = _folded(arm.build(resolved), self.family, arm)
        # Cast first: in fp32 a model may not fit on the device.
        cast_weights(model, DTYPES[setting.dtype])
        self.model = model.eval().to(device)
        self.vocabulary = vocabulary_of(self.model)
        self._extra = arm.extra_positions()

    @torch.no_grad()
    def inference(self, batch: int) -> Inference:
        """Time one forward pass of `batch` examples."""
        inputs: dict[str, Any] = training_batch(
            self.family, self.vocabulary, rows=batch, tokens=self.setting.seq, target=1
        )
        labels = inputs.pop("labels")
        if self.family.kind == "encoder-decoder":
            # One decoder token: decoding more of them is timed on its own.
            inputs["decoder_input_ids"] = labels
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        inputs |= forward_options(self.family)
        # A third of the budget for training steps is enough for a forward pass.
        budget_s = self.setting.seconds / 3
        times = repeated(lambda: self.model(**inputs), self.device, budget_s=budget_s)
        # Not while it is timed: watching every operation slows a CPU down.
        with self._bytes as watched:
            self.model(**inputs)
            peak = watched.peak()
        return Inference(batch=batch, seconds=Spread.of(times), peak_bytes=peak)

    @torch.no_grad()
    def decoding(self, context: int) -> Decoding:
        """Time one more token of one sequence with `context` tokens in the cache.

        An encoder-decoder has as many source tokens, too.
        """
        model, cache, before = self._without_prompt()
        # Encoded once, as in generation: only the decoder runs for each token.
        source = self._source(before + context)
        output = model(**self._ids(context), past_key_values=cache, use_cache=True, **source)
        held_bytes = cache_bytes(output.past_key_values)
        token = self._ids(1)

        def decode_one() -> None:
            nonlocal output
            cache = output.past_key_values
            output = model(**token, past_key_values=cache, use_cache=True, **source)

        # The cache grows with every call: a fixed number of calls keeps the context comparable.
        times = repeated(decode_one, self.device, budget_s=0.0, least=self.setting.decoded)
        return Decoding(context_tokens=context, token_s=Spread.of(times), kv_bytes=held_bytes)

    def _without_prompt(self) -> tuple[Any, Any, int]:
        """The model to decode with, the cache to begin with, and vectors before the source.

        peft's wrapper puts its prompt before every call, also where the cache holds it already; its
        `generate` does so once.
        """
        model: Any = self.model
        if not isinstance(model, PeftModel) or not model.active_peft_config.is_prompt_learning:
            return model, None, 0
        base = model.get_base_model()
        if model.active_peft_config.peft_type == PeftType.PREFIX_TUNING:
            return base, model.get_prompt(1), 0
        # Decoders are refused with the others, and in T5 the encoder reads the prompt.
        return base, None, self._extra

    def why_not(self, context: int) -> str | None:
        """Say why there is no decoding at this length; None where there is."""
        if self.family.kind == "encoder":
            return NO_DECODING
        config: Any = self.model.config
        positions = self.family.positions(config)
        # `repeated` decodes two more tokens than it times.
        needed = context + self._extra + self.setting.decoded + 2
        if positions is None or needed <= positions:
            return None
        return f"{needed} tokens exceed the backbone's {positions} positions"

    def _ids(self, length: int) -> dict[str, Tensor]:
        name = "input_ids"
        if self.family.kind == "encoder-decoder":
            name = "decoder_input_ids"
        return {name: random_ids(self.vocabulary, 1, length).to(self.device)}

    def _source(self, length: int) -> dict[str, Any]:
        """Encode an encoder-decoder's source; {} for other families."""
        if self.family.kind != "encoder-decoder":
            return {}
        encoder: Any = self.model.get_encoder()  # type: ignore[operator]
        ids = random_ids(self.vocabulary, 1, length, seed=1).to(self.device)
        return {"encoder_outputs": encoder(input_ids=ids)}


def _folded(model: nn.Module, family: Family, arm: ArmChoice) -> nn.Module:
    variant: Any = variants.get(arm.attention).configure({})
    variant.fold(model, family)
    return model
