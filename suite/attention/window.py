"""Sliding-window attention: a token sees those near it, and the first tokens of its text (sinks).

The decoder's cache keeps `window + sinks` tokens, however long the text becomes.

Source: Beltagy et al., Longformer, arXiv 2004.05150, section 3.1 (sliding window); Jiang et al.,
    Mistral 7B, arXiv 2310.06825, section 2 (a decoder's token sees itself and the window - 1 tokens
    before it; rolling cache); Xiao et al., StreamingLLM, arXiv 2309.17453, section 3.2 (four first
    tokens stay visible, as models put attention there).
Deviations:
    - A checkpoint is converted by its mask alone. No weight changes, and texts of at most `window`
      tokens give the checkpoint's own numbers, bit for bit.
    - Keys stay rotated by their true positions, and T5's position bias is that of true distances.
      StreamingLLM counts positions within the cache, for texts longer than the model's positions;
      such texts are refused here.
    - Sinks are the first tokens of each row's text, behind left padding.
    - Encoders see window - 1 tokens on either side, so that `window` means what it does in a
      decoder; Longformer and ModernBERT count both sides together. Encoders' sinks are seen by all
      tokens, but do not see all, as Longformer's global tokens do.
    - Cross-attention sees the whole source.
    - The cache keeps one token more than the next step sees, so that it is `window + sinks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from suite.attention import _surgery as surgery
from suite.attention._cache import own_cache, use_cache_layer
from suite.attention._route import check_plain, route
from suite.attention.base import Options, Variant
from suite.backbones.base import AttentionSite, Family, SelfSite, has_windows
from suite.errors import IncompatibleError


class WindowOptions(Options):
    """How far a token sees, and where."""

    window: Annotated[int, Field(ge=1)] = Field(
        128,
        description="tokens that a token sees: itself and those before it, in encoders as many"
        " after it (ours; ModernBERT's local layers see 128); below training.max_length, because"
        " on shorter texts it computes what pretrained does",
    )
    sinks: Annotated[int, Field(ge=0)] = Field(
        4, description="first tokens that stay visible (StreamingLLM 3.2); 0 = none"
    )
    sites: Annotated[list[SelfSite], Field(min_length=1)] | None = Field(
        None, description="whose self-attentions; null = all"
    )


class WindowLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores the keys and values of the last `window` tokens and of each row's first `sinks`.

    A column is a token's place in its padded row, counted from 0. Shapes: B rows, K kept tokens.

    Attributes:
        length: Columns so far, kept or not.
        first: (B, 1), the column where each row's text begins; None before the first tokens.
    """

    def __init__(self, window: int, sinks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.sinks = sinks
        self.length = 0
        self.first: Tensor | None = None

    def kept(self) -> Tensor:
        """The columns of what is stored, (B, K), in ascending order."""
        assert self.first is not None
        recent = min(self.length, self.window)
        others = min(self.length - recent, self.sinks)
        device = self.first.device
        # a row whose text began lately has no sinks before the window yet; the slots hold padding
        start = self.first.clamp(max=self.length - recent - others)  # (B, 1)
        sinks = start + torch.arange(others, device=device)  # (B, others)
        window = torch.arange(self.length - recent, self.length, device=device)
        return torch.cat([sinks, window.expand(len(start), -1)], dim=1)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (B, h, n, d) each, and return them behind what was kept before."""
        before = self.kept()
        keys, values = super().update(key_states, value_states)
        added = torch.arange(self.length, self.length + key_states.shape[-2], device=before.device)
        columns = torch.cat([before, added.expand(len(before), -1)], dim=1)
        self.length += len(added)
        if columns.shape[1] > self.window + self.sinks:
            # what is kept is always among what was kept and what came
            slots = torch.searchsorted(columns, self.kept())[:, None, :, None]  # (B, 1, K, 1)
            # copies, as a view would hold the tokens that it does not show
            self.keys = torch.take_along_dim(keys, slots, dim=-2)
            self.values = torch.take_along_dim(values, slots, dim=-2)
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        super().reset()
        self.length = 0
        self.first = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.first is not None:
            self.first = self.first.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.length > self.window + self.sinks:
            raise IncompatibleError(
                "attention window: a cache that has dropped tokens cannot be cropped, as assisted"
                " decoding does; decode without an assistant"
            )
        super().crop(tokens_to_remove)
        self.length -= abs(tokens_to_remove)

    def _select(self, rows: Tensor) -> None:
        if self.first is not None:
            self.first = self.first[rows.to(self.first.device)]


@dataclass(slots=True)
class Seen:
    """What the keys of one forward pass are.

    Attributes:
        columns: (B, m), the column of each key.
        length: Columns of the mask: those of all keys so far, kept or not.
        first: (B, 1), the column where each row's text begins.
    """

    columns: Tensor
    length: int
    first: Tensor


@dataclass(frozen=True, slots=True)
class Limit:
    """Hides the keys that a query is too far from. Shapes: n queries, m keys.

    Attributes:
        window: How far a query sees.
        sinks: First tokens that every query sees.
    """

    window: int
    sinks: int

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Narrow the mask, (B, 1, n, columns), to the visible ones of the keys, (B, 1, n, m).

        Returns:
            The mask, and the options of the attention with `position_bias` for these keys.
        """
        seen: Seen | None = module.__dict__.pop("seen", None)
        if seen is None:
            columns = torch.arange(key.shape[-2], device=key.device)
            seen = Seen(columns[None], key.shape[-2], first_columns(mask, len(key), key.device))
        # everything is near: the backbone's own mask, and its own numbers to the last bit
        if seen.length <= self.window:
            return mask, options
        visible = self._visible(module, query, seen)
        if seen.length > key.shape[-2]:
            slots = seen.columns[:, None, None, :]  # (B, 1, 1, m)
            if mask is not None:
                mask = torch.take_along_dim(mask, slots, dim=-1)
            bias = options.get("position_bias")
            if bias is not None:
                options = {**options, "position_bias": torch.take_along_dim(bias, slots, dim=-1)}
        if mask is None:
            return visible, options
        if mask.dtype == torch.bool:
            return mask & visible, options
        return mask.masked_fill(~visible, torch.finfo(mask.dtype).min), options

    def _visible(self, module: Any, query: Tensor, seen: Seen) -> Tensor:
        """Which keys a query may see for their distance, (B, 1, n, m)."""
        columns = seen.columns
        queries = torch.arange(seen.length - query.shape[-2], seen.length, device=columns.device)
        back = queries[:, None] - columns[:, None, :]  # (B, n, m)
        in_text = columns - seen.first  # (B, m)
        is_sink = (in_text >= 0) & (in_text < self.sinks)
        visible = (back.abs() < self.window) | is_sink[:, None]
        if module.is_causal:
            visible = visible & (back >= 0)
        return visible[:, None]


def first_columns(mask: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """The column where each row's text begins, (B, 1); m where it has not begun.

    Args:
        mask: (B or 1, 1, n, m), boolean (True = may attend) or additive; None = no padding.
        rows: B.
        device: Of the keys.
    """
    if mask is None:
        return torch.zeros(rows, 1, dtype=torch.long, device=device)
    # the last query sees all of a text that is before it
    last = mask[:, 0, -1]  # (B or 1, m)
    may_attend = last if last.dtype == torch.bool else last >= 0
    # argmax gives the first of several ones, and 0 where there is none
    first = may_attend.int().argmax(dim=-1, keepdim=True)
    first = first.masked_fill(~may_attend.any(dim=-1, keepdim=True), may_attend.shape[-1])
    return first.expand(rows, -1)


class Window(Variant[WindowOptions]):
    description = "a token sees those near it and the first few; the cache stops growing"
    source = (
        "Longformer, arXiv 2004.05150, section 3.1; Mistral 7B, arXiv 2310.06825, section 2;"
        " StreamingLLM, arXiv 2309.17453, section 3.2"
    )
    not_shared = (
        "its layers drop other tokens than a layer that takes from them would need; use one of them"
    )
    is_plain_folded = False
    Config = WindowOptions

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        self._check_text(model, family)
        names = self._site_names()
        for site in surgery.chosen_sites(model, family, names, variant=self.name):
            self._limit(site)

    def cached_tokens(self, site: AttentionSite, family: Family) -> int | None:
        if site.site not in self._site_names():
            return None
        return self.config.window + self.config.sinks

    def _site_names(self) -> list[SelfSite]:
        return self.config.sites or ["encoder-self", "decoder-self"]

    def _check_text(self, model: PreTrainedModel, family: Family) -> None:
        """Check that the window is one, and the only one.

        Raises:
            IncompatibleError: It is as long as any text, or some layers have windows already.
        """
        positions = family.positions(model.config)
        if positions is not None and self.config.window > positions:
            raise IncompatibleError(
                f"attention {self.name}: a window of {self.config.window} tokens is longer than the"
                f" backbone's {positions} positions, so it would hide nothing; set options.window"
                f" to at most {positions}"
            )
        if has_windows(model.config):
            raise IncompatibleError(
                f"attention {self.name}: some layers of this {family.name} backbone see a window of"
                " their own, which would hide the sinks; use a backbone whose layers see the whole"
                " text"
            )

    def _limit(self, site: AttentionSite) -> None:
        check_plain(site.module, variant=self.name)
        module: Any = site.module
        module.limit = Limit(self.config.window, self.config.sinks)
        route(module)
        if site.role == "decoder":
            use_cache_layer(module, WindowLayer, window=self.config.window, sinks=self.config.sinks)
            # after the hook that places the cache's layer
            module.register_forward_pre_hook(_look, with_kwargs=True)


def _look(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Note which keys the attention is about to see, where it has a cache."""
    cache = own_cache(kwargs)
    if cache is None:
        return None
    layer: WindowLayer = cache.layers[attention.layer_idx]
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]  # (B, n, width)
    mask = kwargs.get("attention_mask", kwargs.get("mask"))  # T5 calls it `mask`
    # every time, as a row that is fed token by token may have had padding alone so far
    if layer.first is None or mask is not None:
        layer.first = first_columns(mask, len(hidden), hidden.device)
    n = hidden.shape[1]
    length = layer.length + n
    added = torch.arange(layer.length, length, device=hidden.device).expand(len(hidden), -1)
    attention.seen = Seen(torch.cat([layer.kept(), added], dim=1), length, layer.first)
    # T5's first layer would number the kept keys from 0
    if getattr(attention, "has_relative_attention_bias", False):
        bias = attention.compute_bias(
            n, length, device=hidden.device, past_seen_tokens=layer.length
        )
        return args, {**kwargs, "position_bias": bias}
    return None
