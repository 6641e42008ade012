"""An arm as it is used: one forward pass without gradients, and decoding token by token with a cache. One device, whole weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from suite.attention import variants
from suite.attention._cache import cache_bytes
from suite.backbones.base import Family
from suite.profile.arms import ArmChoice
from suite.profile.batches import forward_options, random_ids, training_batch
from suite.profile.clock import LiveBytes, repeated
from suite.profile.estimate import DTYPES, vocabulary_of
from suite.profile.record import NO_DECODING, Decoding, Inference, Spread
from suite.profile.setting import Setting


class Serving:
    """An arm in evaluation mode, its attention folded as it would be served; the method's own modules stay as they were trained.

    Args:
        arm: Which.
        setting: Shapes and precision.
        device: Where.
    """

    def __init__(self, arm: ArmChoice, setting: Setting, device: torch.device) -> None:
        self.setting, self.device = setting, device
        self._bytes = LiveBytes(device)
        torch.manual_seed(0)
        resolved = arm.resolve()
        self.family = resolved.family
        self.model = (
            _folded(arm.build(resolved), self.family, arm).eval().to(device, DTYPES[setting.dtype])
        )
        self.vocabulary, self._extra = vocabulary_of(self.model), arm.extra_positions()

    @torch.no_grad()
    def inference(self, batch: int) -> Inference:
        """One forward pass of `batch` examples."""
        shape = {"rows": batch, "tokens": self.setting.seq, "target": 1}
        made = training_batch(self.family, self.vocabulary, **shape)
        inputs: dict[str, Any] = {
            name: tensor.to(self.device) for name, tensor in made.items() if name != "labels"
        }
        if self.family.kind == "encoder-decoder":
            inputs["decoder_input_ids"] = made["labels"].to(self.device)
        inputs |= forward_options(self.family)
        times = repeated(lambda: self.model(**inputs), self.device, budget_s=self._budget_s)
        with self._bytes as watched:
            self.model(**inputs)
            peak = watched.peak()
        return Inference(batch=batch, seconds=Spread.of(times), peak_bytes=peak)

    @torch.no_grad()
    def decoding(self, context: int) -> Decoding:
        """One more token of one sequence with `context` tokens cached (T5: as many source tokens too)."""
        fixed = self._source(context)
        output = self.model(**self._ids(context), **fixed, use_cache=True)
        held = cache_bytes(output.past_key_values)
        token = self._ids(1)

        def one() -> None:
            nonlocal output
            output = self.model(
                **token, past_key_values=output.past_key_values, use_cache=True, **fixed
            )

        times = repeated(one, self.device, budget_s=0.0, least=self.setting.decoded)
        return Decoding(context_tokens=context, token_s=Spread.of(times), kv_bytes=held)

    def why_not(self, context: int) -> str | None:
        """Why there is no decoding at this length; None where there is."""
        if self.family.kind == "encoder":
            return NO_DECODING
        config: Any = self.model.config
        positions = (
            getattr(config, "max_position_embeddings", None)
            if self.family.kind == "decoder"
            else None
        )
        needed = context + self._extra + self.setting.decoded + 2
        return (
            None
            if positions is None or needed <= positions
            else f"{needed} tokens exceed the backbone's {positions} positions"
        )

    @property
    def _budget_s(self) -> float:
        return self.setting.seconds / 3

    def _ids(self, length: int, *, seed: int = 0) -> dict[str, Tensor]:
        name = "decoder_input_ids" if self.family.kind == "encoder-decoder" else "input_ids"
        return {name: random_ids(self.vocabulary, 1, length, seed=seed).to(self.device)}

    def _source(self, length: int) -> dict[str, Any]:
        if self.family.kind != "encoder-decoder":
            return {}
        encoder: Any = self.model.get_encoder()  # type: ignore[operator]
        return {
            "encoder_outputs": encoder(
                input_ids=random_ids(self.vocabulary, 1, length, seed=1).to(self.device)
            )
        }


def _folded(model: nn.Module, family: Family, arm: ArmChoice) -> nn.Module:
    variant: Any = variants.get(arm.attention).configure({})
    variant.fold(model, family)
    return model
