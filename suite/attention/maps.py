"""Watch the attention probabilities of a model's layers while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention._route import check_plain, observe
from suite.backbones.base import AttentionSite, Family, window_of
from suite.errors import IncompatibleError
from suite.metrics.attention_maps import Reach


def self_attentions(model: PreTrainedModel, family: Family) -> dict[str, list[AttentionSite]]:
    """The self-attentions of each stack in order, by the name of their site.

    Raises:
        IncompatibleError: The variant has no attention probabilities.
    """
    found: dict[str, list[AttentionSite]] = {}
    for site in family.attention_sites(model):
        if site.kind == "self":
            check_plain(site.module, variant="maps")
            found.setdefault(site.site, []).append(site)
    if not found:
        raise IncompatibleError(
            "attention maps: this attention variant mixes tokens without attention probabilities;"
            " choose another"
        )
    return found


@contextmanager
def watched(sites: dict[str, list[AttentionSite]]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the attention probabilities of every layer while the model runs.

    They are (B, H, n, m), after softmax and before dropout. A layer that takes another's
    probabilities returns those.

    Yields:
        The probabilities of each layer, by site; empty the lists between two forward passes.
    """
    seen: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for name, of_stack in sites.items():
            seen[name] = []
            for site in of_stack:
                hooks.enter_context(_watch(site.module, seen[name]))
        yield seen


def reach(site: AttentionSite) -> Reach:
    """How far one self-attention sees: by the window of a variant, or the backbone's own."""
    module: Any = site.module
    limit = getattr(module, "limit", None)
    if limit is not None:
        return Reach(limit.window, limit.sinks)
    return Reach(window_of(module))


def _watch(attention: nn.Module, into: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    observe(attention)
    # every family's attention returns its probabilities last
    return attention.register_forward_hook(lambda _module, _args, output: into.append(output[-1]))
