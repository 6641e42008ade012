"""Cache layers that store less than a key and a value per token, put into whatever cache `generate` made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from suite.errors import IncompatibleError


class KeyOnlyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores the keys; the values are the keys (SKV, EL-attention)."""

    @property
    def values(self) -> Tensor | None:
        return self.keys

    @values.setter
    def values(self, _stored: Tensor | None) -> None:
        """Nothing is stored: whatever the library does to the keys has been done to the values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stored: Any = self.keys
        self.keys = torch.cat([stored, key_states], dim=-2)
        return self.keys, self.keys


class ValueOnlyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores the values; who shares another layer's attention needs no keys (Shared Attention)."""

    @property
    def keys(self) -> Tensor | None:
        return self.values

    @keys.setter
    def keys(self, _stored: Tensor | None) -> None:
        """Nothing is stored."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stored: Any = self.values
        self.values = torch.cat([stored, value_states], dim=-2)
        return self.values, self.values


class LengthOnlyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores how many tokens there were and no number of any: keys and values are another layer's (CLA)."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        super().update(key_states[..., :0], value_states[..., :0])
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]


def use_cache_layer(attention: nn.Module, kind: type[DynamicLayer]) -> None:
    """Let one attention keep its part of every cache in layers of `kind`."""
    known: Any = attention
    if getattr(known, "cache_layer", None) is None:
        attention.register_forward_pre_hook(_provide, with_kwargs=True)
    known.cache_layer = kind


def _provide(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the attention runs: its layer of the cache is one of its own kind."""
    cache = kwargs.get("past_key_values")
    if cache is None:
        return
    if isinstance(cache, EncoderDecoderCache):
        crosses = (
            kwargs.get("key_value_states") is not None
            or kwargs.get("encoder_hidden_states") is not None
        )
        cache = cache.cross_attention_cache if crosses else cache.self_attention_cache
    if not isinstance(cache, DynamicCache):
        raise IncompatibleError(
            f"attention: got a {type(cache).__name__}, expected a DynamicCache; leave `cache_implementation` unset"
        )
    while len(cache.layers) <= attention.layer_idx:
        cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
    layer = cache.layers[attention.layer_idx]
    if isinstance(layer, attention.cache_layer):
        return
    if layer.get_seq_length():
        raise IncompatibleError(
            f"attention: the cache came with keys and values in layer {attention.layer_idx}; start with an empty one"
        )
    cache.layers[attention.layer_idx] = attention.cache_layer()


def cache_bytes(cache: Any) -> int:
    """Bytes of the distinct tensors that a cache holds."""
    parts = (
        (cache.self_attention_cache, cache.cross_attention_cache)
        if isinstance(cache, EncoderDecoderCache)
        else (cache,)
    )
    layers: list[Any] = [layer for part in parts for layer in part.layers]
    tensors = [t for layer in layers for t in (layer.keys, layer.values) if t is not None]
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
