"""Watch the attention probabilities of a model's layers while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention._route import check_plain, observe
from suite.backbones.base import AttentionSite, Family
from suite.errors import IncompatibleError


def self_attentions(model: PreTrainedModel, family: Family) -> dict[str, list[AttentionSite]]:
    """The self-attentions of each stack in order, by the name of their site.

    Raises:
        IncompatibleError: There is none with probabilities.
    """
    found: dict[str, list[AttentionSite]] = {}
    for site in family.attention_sites(model):
        if site.kind == "self":
            check_plain(site.module, variant="maps")
            found.setdefault(site.site, []).append(site)
    if not found:
        raise IncompatibleError(
            "attention maps: this attention variant mixes tokens without attention probabilities; choose another"
        )
    return found


@contextmanager
def watched(sites: dict[str, list[AttentionSite]]) -> Iterator[dict[str, list[Tensor]]]:
    """What every attention gave in the last forward pass: by site, the probabilities of each layer, (B, H, n, m).

    They are those after softmax and before dropout; layers that take another's give that one's. Empty it between passes.
    """
    seen: dict[str, list[Tensor]] = {name: [] for name in sites}
    handles = [
        _watch(site.module, seen[name]) for name, of_stack in sites.items() for site in of_stack
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _watch(attention: nn.Module, into: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    observe(attention)
    return attention.register_forward_hook(lambda _module, _args, output: into.append(output[-1]))
