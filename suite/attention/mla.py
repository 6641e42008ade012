"""Multi-head latent attention: keys and values are made of one short vector per token, the latent.

The cache holds the latent, and of rotated keys only the features that stay rotated.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 (the attention; its rotary part is decoupled).
    The conversion is that of MHA2MLA, arXiv 2502.14837, section 3, and its code: keep the rotation
    of each key head's highest frequencies ("high"), drop it elsewhere, and factorise the stacked
    maps of the other key features and of the values by one SVD. TransMLA, arXiv 2502.07864, also
    factorises keys and values jointly.
Deviations:
    - The rotated features are each key head's own, as in MHA2MLA. DeepSeek-V2 and TransMLA have one
      rotated key for all heads.
    - MHA2MLA may also choose the frequencies by the norms of queries and keys on data, and TransMLA
      balances keys and values on data first; here the weights alone decide.
    - Both factors of the SVD get the square root of the spectrum; MHA2MLA's code leaves all of it
      to the maps from the latent.
    - No norm on the latent and no latent for queries, as in MHA2MLA; DeepSeek-V2 has both.
    - Keys and values are made anew of all cached latents in every step, until the model is folded:
      then a step of decoding absorbs these maps into queries and results, as DeepSeek-V2 does.
    - The bias of keys that are not rotated goes: it adds the same to all scores of a query.
    - Encoders and encoder-decoders too, whose keys are not rotated: there the latent is all.
    - The rank is a multiple of the heads' width, because transformers' attentions cut what a map
      returns into heads.
What is exact: without rotation, a rank of min(2 · key heads · width, input width) gives the
checkpoint's function. With rotation, `rotary` = the heads' width does, with a rank of min(key heads
· width, input width); fewer rotated features change the function at any rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from suite.attention import _surgery as surgery
from suite.attention._cache import use_cache_layer
from suite.attention._route import HeadTransform, normalised, route, scaling
from suite.attention.base import Options, Variant
from suite.attention.gqa import Sites, site_names
from suite.backbones.base import Absent, AttentionSite, Family
from suite.errors import IncompatibleError


class MlaOptions(Options):
    """How much is kept of keys and values, and where."""

    rank: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="width of the latent, a multiple of the heads' width; null = a quarter of what"
        " keys and values have together (ours)",
    )
    rotary: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="features of each key head that stay rotated, even; the heads' width = all,"
        " which is exact; null = a quarter (ours), all where heads are normalised, 0 where nothing"
        " is rotated",
    )
    sites: Sites | None = Field(
        None,
        description="decoder: its self- and cross-attention (default on encoder-decoders); all"
        " (default elsewhere); or names",
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths of one converted attention.

    Attributes:
        heads: h, key-value heads.
        width: d, of a head.
        rotary: r, features of a head that stay rotated: the first r / 2 of either half.
        rank: Of the latent.
    """

    heads: int
    width: int
    rotary: int
    rank: int

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split the rows of a key map, (h d, ...), into (h r, ...) and (h (d - r), ...)."""
        if not self.rotary:
            return rows[:0], rows
        # features i and i + d / 2 are rotated together, the faster the smaller i
        halves = rows.view(self.heads, 2, self.width // 2, *rows.shape[1:])
        kept = halves[:, :, : self.rotary // 2]
        others = halves[:, :, self.rotary // 2 :]
        return kept.flatten(0, 2), others.flatten(0, 2)

    def rotated(self, heads: Tensor) -> Tensor:
        """The rotated features of key heads, (B, h, n, d) to (B, h, n, r)."""
        halves = heads.view(*heads.shape[:-1], 2, -1)  # (B, h, n, 2, d / 2)
        return halves[..., : self.rotary // 2].flatten(-2)

    def still(self, heads: Tensor) -> Tensor:
        """The features that are not rotated, (B, h, n, d) to (B, h, n, d - r)."""
        halves = heads.view(*heads.shape[:-1], 2, -1)
        return halves[..., self.rotary // 2 :].flatten(-2)


class RotaryKeys(nn.Linear):
    """A key map that has rows for the rotated features alone; it returns zeros for the others.

    `out_features` is the width of what it returns, h·d.

    Args:
        weight: (h r, d_in).
        bias: (h r), or None.
        shape: The attention's widths.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, shape: Shape) -> None:
        super().__init__(weight.shape[1], shape.heads * shape.width, bias=False, device="meta")
        inner = surgery.linear(weight, bias)
        self.weight = inner.weight
        self.bias = inner.bias
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, d_in) to (B, L, h·d)."""
        rotated = nn.functional.linear(x, self.weight, self.bias)  # (B, L, h r)
        halves = rotated.view(*x.shape[:-1], self.shape.heads, 2, -1)
        missing = (self.shape.width - self.shape.rotary) // 2
        whole: Tensor = nn.functional.pad(halves, (0, missing)).flatten(-3)
        return whole


class FromLatent(HeadTransform):
    """Makes all key and value heads of latents and rotated features.

    Args:
        keys: Map from the latent to the features of keys that are not rotated, (h (d - r), rank);
            None where all are.
        values: Map from the latent to values, (h d, rank), and a bias.
        shape: The attention's widths.
    """

    def __init__(self, keys: Tensor | None, values: nn.Linear, shape: Shape) -> None:
        super().__init__()
        self.key_up = None if keys is None else surgery.linear(keys, None)
        self.value_up = values
        self.shape = shape

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn what was projected or cached into heads.

        Args:
            query: (B, H, n, d).
            key: (B, h, m, d) as projected, or (B, h, m, r) from the cache.
            value: The latents, (B, rank / d, m, d) as projected, or (B, 1, m, rank).
        """
        latent = value.transpose(1, 2).flatten(2)  # (B, m, rank)
        values = self._heads(self.value_up(latent))
        if self.key_up is None:
            return query, key, values
        made = self._heads(self.key_up(latent))  # (B, h, m, d - r)
        if not self.shape.rotary:
            return query, made, values
        if key.shape[-1] != self.shape.rotary:
            key = self.shape.rotated(key)
        halves = [part.unflatten(-1, (2, -1)) for part in (key, made)]
        return query, torch.cat(halves, dim=-1).flatten(-2), values

    def can_absorb(self) -> bool:
        """Whether both maps are plain, and no method put anything around them."""
        is_plain = type(self.key_up) is nn.Linear and type(self.value_up) is nn.Linear
        return is_plain and self.key_up is not None and self.key_up.bias is None

    def attend(
        self,
        attention: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend to latents as they are: q (W c) = (q W) c for keys, and W (p c) for values.

        Source: DeepSeek-V2, section 2.1.2.

        Args:
            attention: The attention.
            query: (B, H, 1, d).
            key: As in `forward`, and so is `value`.
            value: The latents.
            mask: As in `probabilities`, and so are `options`.

        Returns:
            (B, 1, H, d) and probabilities (B, H, 1, m).
        """
        assert self.key_up is not None
        shape = self.shape
        latent = value.transpose(1, 2).flatten(2)  # (B, m, rank)
        by_head = query.unflatten(1, (shape.heads, -1))  # (B, h, g, 1, d), g queries of a key head
        key_up = self.key_up.weight.view(shape.heads, -1, shape.rank)  # (h, d - r, rank)
        absorbed = torch.einsum("bhgnd,hdr->bhgnr", shape.still(by_head), key_up)
        # heads are rows here, so that no head gets a copy of the latents
        scores = absorbed.flatten(1, 3) @ latent.transpose(1, 2)  # (B, H, m)
        if shape.rotary:
            if key.shape[-1] != shape.rotary:
                key = shape.rotated(key)
            of_queries = shape.rotated(by_head).flatten(2, 3)  # (B, h, g, r)
            scores = scores + (of_queries @ key.transpose(-1, -2)).flatten(1, 2)
        scaled = scores[:, :, None] * scaling(query, options)  # (B, H, 1, m)
        seen = normalised(attention, scaled, mask, **options).to(value.dtype)
        found = (seen[:, :, 0] @ latent).unflatten(1, (shape.heads, -1))  # (B, h, g, rank)
        value_up = self.value_up.weight.view(shape.heads, -1, shape.rank)  # (h, d, rank)
        values = torch.einsum("bhgr,hdr->bhgd", found, value_up)
        bias: Tensor | None = self.value_up.bias
        if bias is not None:
            values = values + bias.view(shape.heads, 1, -1)
        return values.flatten(1, 2)[:, None], seen  # (B, 1, H, d)

    def _heads(self, x: Tensor) -> Tensor:
        """Cut (B, m, h w) into (B, h, m, w)."""
        return x.view(*x.shape[:-1], self.shape.heads, -1).transpose(1, 2)


class LatentLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Stores latents as values, and the rotated features of keys as keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = shape

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (B, h, n, d) and (B, rank / d, n, d) as (B, h, n, r) and (B, 1, n, rank)."""
        rotated = key_states[..., :0]
        if self.shape.rotary:
            rotated = self.shape.rotated(key_states)
        latent = value_states.transpose(1, 2).flatten(2)[:, None]
        return super().update(rotated, latent)

    def get_seq_length(self) -> int:
        # by the latents, as keys that are not rotated have no numbers here
        return 0 if self.values is None else self.values.shape[-2]


class Mla(Variant[MlaOptions]):
    description = "keys and values are made of a low-rank latent, which is all that is cached"
    source = (
        "DeepSeek-V2, arXiv 2405.04434, section 2.1; MHA2MLA, arXiv 2502.14837, section 3, and its"
        " code; TransMLA, arXiv 2502.07864"
    )
    not_shared = "each layer makes its keys and values with maps of its own; use one of them"
    is_plain_folded = False
    Config = MlaOptions

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        names = site_names(self.config.sites, family)
        for site in surgery.chosen_sites(model, family, names, variant=self.name):
            shape = self._shape(site, family)
            self._factorise(site, shape)
            if family.rotates and shape.rotary < shape.width:
                site.module.register_forward_pre_hook(_stop_rotation, with_kwargs=True)

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        if site.site not in site_names(self.config.sites, family):
            return super().cached_floats(site, family)
        shape = self._shape(site, family)
        return shape.rank + shape.heads * shape.rotary

    def cached_tokens(self, site: AttentionSite, family: Family) -> int | None:
        if site.site not in site_names(self.config.sites, family):
            return super().cached_tokens(site, family)
        # the latents of all tokens stay, also where the layer sees a window (Gemma)
        return None

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        for heads in surgery.modules_in(model, FromLatent):
            found.append(heads.value_up.weight)
            if heads.key_up is not None:
                found.append(heads.key_up.weight)
        return found

    def fold(self, model: PreTrainedModel, family: Family) -> None:
        """Let a step of decoding attend to latents, and make no keys and values of them.

        The same function up to rounding. Where no latent makes keys, or a method changed the maps
        from the latent, everything stays as it is.
        """
        for heads in surgery.modules_in(model, FromLatent):
            heads.absorbs = heads.can_absorb()

    def _factorise(self, site: AttentionSite, shape: Shape) -> None:
        maps = surgery.projections(site)
        key: Any = maps.k
        value: Any = maps.v
        rotated, others = shape.split(key.weight.detach())
        up, down = factors(torch.cat([others, value.weight.detach()]), shape.rank)
        key_up = up[: len(others)]
        value_up = surgery.linear(up[len(others) :], value.bias)
        heads = FromLatent(key_up if len(others) else None, value_up, shape)
        if not shape.rotary:
            maps.k = Absent(site.head_dim)
        elif shape.rotary < shape.width:
            bias = None if key.bias is None else shape.split(key.bias.detach())[0]
            maps.k = RotaryKeys(rotated, bias, shape)
        maps.v = surgery.linear(down, None)
        surgery.place(site, maps)
        module: Any = site.module
        module.num_key_value_groups = site.heads // site.kv_heads
        route(module, heads)
        use_cache_layer(module, LatentLayer, shape=shape)

    def _shape(self, site: AttentionSite, family: Family) -> Shape:
        """The widths of a site after its conversion.

        Raises:
            IncompatibleError: The options do not fit it.
        """
        rotary = self._rotary(site, family)
        # the query map stays as it is, so that a converted site has the same answer
        query: Any = surgery.projections(site).q
        width = site.head_dim
        rank = self.config.rank or -(-site.kv_heads // 2) * width
        together = site.kv_heads * (2 * width - rotary)
        most = min(together, query.in_features)
        if rank > most:
            raise IncompatibleError(
                f"attention {self.name}: a rank of {rank} is over {most}, where nothing is lost any"
                f" more: the latent replaces {together} numbers that are made of"
                f" {query.in_features}; set options.rank to at most {most}"
            )
        if rank % width:
            raise IncompatibleError(
                f"attention {self.name}: a rank of {rank} is no multiple of the heads' width,"
                f" {width}; set options.rank to a multiple of {width}, at most {most}"
            )
        return Shape(site.kv_heads, width, rotary, rank)

    def _rotary(self, site: AttentionSite, family: Family) -> int:
        """Features of each key head that stay rotated."""
        given = self.config.rotary
        if not family.rotates:
            if given:
                raise IncompatibleError(
                    f"attention {self.name}: rotary {given}: a {family.name} backbone rotates no"
                    " keys; leave options.rotary out"
                )
            return 0
        width = site.head_dim
        rotary = given
        if rotary is None and site.k_norm:
            rotary = width
        elif rotary is None:
            rotary = max(2 * (width // 8), 2)  # a quarter, even
        if rotary % 2 or rotary > width:
            raise IncompatibleError(
                f"attention {self.name}: rotary {rotary}: features are rotated in pairs, and a head"
                f" has {width}; set options.rotary to an even number up to {width}"
            )
        if rotary < width and site.k_norm:
            raise IncompatibleError(
                f"attention {self.name}: layer {site.layer} normalises whole key heads before it"
                f" rotates them, so that a latent cannot make a part of one; set options.rotary to"
                f" {width} (all), which compresses values alone"
            )
        return rotary


def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The nearest product of two matrices, (n, d_in) to (n, rank) and (rank, d_in).

    Each has the square root of the spectrum.
    """
    if weight.is_meta:  # it has shapes and no numbers
        return weight.new_empty(len(weight), rank), weight.new_empty(rank, weight.shape[1])
    u, spectrum, v = torch.linalg.svd(weight.double(), full_matrices=False)
    root = spectrum[:rank].sqrt()
    down = root[:, None] * v[:rank]
    # a machine's library chooses the signs; without them a trial could not go on elsewhere
    largest = down.gather(1, down.abs().argmax(dim=1, keepdim=True))  # (rank, 1)
    sign = largest.sign()
    up = u[:, :rank] * root * sign.T
    return up.to(weight.dtype), (down * sign).to(weight.dtype)


def _stop_rotation(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rotate the kept features alone: an angle of 0 for the others, in queries as in keys."""
    cos, sin = kwargs["position_embeddings"]  # (B, n, d) each
    shape: Shape = attention.heads.shape
    half = shape.width // 2
    feature = torch.arange(shape.width, device=cos.device)
    is_still = feature % half >= shape.rotary // 2
    still = (cos.masked_fill(is_still, 1.0), sin.masked_fill(is_still, 0.0))
    return args, {**kwargs, "position_embeddings": still}
