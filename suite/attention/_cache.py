"""Cache layers that store less than a key and a value per token.

They take their places in whatever cache `generate` made. Shapes: B rows, h heads, m tokens so far,
d width of a head; keys and values are (B, h, m, d).
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """Store nothing: the library reorders and crops the keys, and so the values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stored: Any = self.keys
        self.keys = torch.cat([stored, key_states], dim=-2)  # (B, h, m + n, d)
        return self.keys, self.keys


class ValueOnlyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores the values; a layer that takes probabilities needs no keys (Shared Attention)."""

    @property
    def keys(self) -> Tensor | None:
        return self.values

    @keys.setter
    def keys(self, _stored: Tensor | None) -> None:
        """Store nothing."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stored: Any = self.values
        self.values = torch.cat([stored, value_states], dim=-2)  # (B, h, m + n, d)
        return self.values, self.values


class LengthOnlyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores how many tokens there were; keys and values are another layer's (CLA)."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # tensors of width 0 have a length and take no memory
        super().update(key_states[..., :0], value_states[..., :0])
        return key_states, value_states

    def get_seq_length(self) -> int:
        # the library's own takes a cache without numbers for an empty one
        return 0 if self.keys is None else self.keys.shape[-2]


def use_cache_layer(attention: nn.Module, layer_class: type[DynamicLayer], **options: Any) -> None:
    """Make one attention keep its part of every cache in a layer of `layer_class`.

    Args:
        attention: The attention.
        layer_class: The class.
        options: What the class is made with.
    """
    known: Any = attention
    # a variant over another one may set the class a second time; one hook is enough
    if getattr(known, "cache_layer", None) is None:
        attention.register_forward_pre_hook(_place_cache_layer, with_kwargs=True)
    known.cache_layer = layer_class
    known.cache_layer_options = options


def own_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache that an attention writes to, among the arguments it was called with; or None."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, EncoderDecoderCache):
        # T5 hands over key_value_states, GPT-2 and BERT encoder_hidden_states
        is_cross = (
            kwargs.get("key_value_states") is not None
            or kwargs.get("encoder_hidden_states") is not None
        )
        return cache.cross_attention_cache if is_cross else cache.self_attention_cache
    return cache


def _place_cache_layer(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put a layer of the attention's class into the cache, before the attention runs."""
    cache = own_cache(kwargs)
    if cache is None:
        return
    if not isinstance(cache, DynamicCache):
        raise IncompatibleError(
            f"attention: got a {type(cache).__name__}, expected a DynamicCache; leave"
            " `cache_implementation` unset"
        )
    while len(cache.layers) <= attention.layer_idx:
        cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
    layer = cache.layers[attention.layer_idx]
    if isinstance(layer, attention.cache_layer):
        return
    if layer.get_seq_length():
        raise IncompatibleError(
            f"attention: the cache came with keys and values in layer {attention.layer_idx};"
            " start with an empty one"
        )
    cache.layers[attention.layer_idx] = attention.cache_layer(**attention.cache_layer_options)


def cache_bytes(cache: Any) -> int:
    """Bytes of the distinct tensors that a cache holds."""
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    distinct: dict[int, Tensor] = {}
    for part in parts:
        for layer in part.layers:
            # a layer of keys alone shows the same tensor as keys and as values
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    distinct[id(tensor)] = tensor
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())
