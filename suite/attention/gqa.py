"""Grouped-query attention: each group of consecutive query heads shares one key and one value head.

Source: Ainslie et al., arXiv 2305.13245, section 2: key and value heads of a checkpoint are
    mean-pooled per group, in the decoder's self- and cross-attention; then uptraining (a `pretrain`
    stage here). WGQA (arXiv 2407.10855, section 3) fine-tunes the pooled model at once and uses
    half of the heads as groups (their setting, hence our default).
Deviations:
    - Also on encoder-only and decoder-only backbones; `sites: all` means every self- and
      cross-attention.
    - Biases (BERT, GPT-2) are pooled like their rows.
    - Queries are not repeated: transformers' attentions repeat the few keys and values, and cache
      only the few.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention import _surgery as surgery
from suite.attention._route import route
from suite.attention.base import Options, Variant
from suite.backbones.base import AttentionSite, Family, SiteName
from suite.errors import IncompatibleError

Sites = Literal["decoder", "all"] | Annotated[list[SiteName], Field(min_length=1)]


class GroupedOptions(Options):
    """Which attention sublayers change, and how the shared heads start."""

    sites: Sites | None = Field(
        None,
        description="decoder: its self- and cross-attention (the paper's; default on"
        " encoder-decoders); all (default elsewhere); or names",
    )
    init: Literal["mean", "random"] = Field(
        "mean",
        description="mean of each group's heads (GQA 2.1), or new weights with the spread of the"
        " old (GQA's ablation)",
    )


class GqaOptions(GroupedOptions):
    """`GroupedOptions`, and how many key-value heads remain."""

    kv_heads: Annotated[int, Field(ge=1)] | None = Field(
        None, description="groups; null = half of the heads (WGQA 3)"
    )


class Gqa(Variant[GqaOptions]):
    description = (
        "groups of query heads share one key and one value head, mean-pooled from the checkpoint"
    )
    source = "GQA, arXiv 2305.13245, section 2"
    Config = GqaOptions

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        names = site_names(self.config.sites, family)
        for site in surgery.chosen_sites(model, family, names, variant=self.name):
            groups = groups_of(site, self.config.kv_heads, variant=self.name)
            maps = surgery.projections(site)
            # keys before values: new weights are drawn in this order
            maps.k = pooled(maps.k, site, groups, init=self.config.init)
            maps.v = pooled(maps.v, site, groups, init=self.config.init)
            surgery.place(site, maps)
            route(site.module)

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        if site.site not in site_names(self.config.sites, family):
            return super().cached_floats(site, family)
        return 2 * groups_of(site, self.config.kv_heads, variant=self.name) * site.head_dim

    def new_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        """The shared key and value maps, where they are drawn anew."""
        if self.config.init == "mean":
            return []
        names = site_names(self.config.sites, family)
        found: list[nn.Parameter] = []
        for site in surgery.chosen_sites(model, family, names, variant=self.name):
            for name in (site.k, site.v):
                found.extend(site.module.get_submodule(name).parameters())
        return found


def site_names(sites: Sites | None, family: Family) -> list[SiteName]:
    """The names of the sites that an option stands for.

    Without an option it is the decoder of an encoder-decoder, and every site elsewhere.
    """
    if isinstance(sites, list):
        return sites
    decoder: list[SiteName] = ["decoder-self", "decoder-cross"]
    if sites == "decoder" or (sites is None and family.kind == "encoder-decoder"):
        return decoder
    return ["encoder-self", *decoder]


def groups_of(site: AttentionSite, kv_heads: int | None, *, variant: str) -> int:
    """Key-value heads after conversion.

    Raises:
        IncompatibleError: They do not divide the key-value heads that the backbone has.
    """
    groups = kv_heads or max(site.kv_heads // 2, 1)
    if site.kv_heads % groups:
        divisors = [n for n in range(1, site.kv_heads + 1) if site.kv_heads % n == 0]
        raise IncompatibleError(
            f"attention {variant}: {site.kv_heads} key-value heads do not split into {groups}"
            f" groups; set options.kv_heads to one of {divisors}"
        )
    return groups


def pooled(
    projection: nn.Module, site: AttentionSite, groups: int, *, init: Literal["mean", "random"]
) -> nn.Linear:
    """A key or value map with `groups` heads: the mean of each group's heads, or new."""
    assert isinstance(projection, nn.Linear)
    if init == "random":
        return surgery.fresh(projection, groups * site.head_dim)
    bias: Tensor | None = projection.bias
    if bias is not None:
        bias = _mean(bias, site, groups)
    return surgery.linear(_mean(projection.weight, site, groups), bias)


def _mean(rows: Tensor, site: AttentionSite, groups: int) -> Tensor:
    """Average consecutive heads: (kv_heads·d, ...) to (groups·d, ...)."""
    grouped = rows.detach().view(groups, site.kv_heads // groups, site.head_dim, *rows.shape[1:])
    # (groups, heads per group, d, ...); the mean is over the heads of a group
    return grouped.mean(1).flatten(0, 1)
