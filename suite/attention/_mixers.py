"""Token mixers: an attention sublayer of an encoder, with its output projection, gives way to a mixing of all tokens.

Source: FNet, arXiv 2105.03824, section 3; its official code. MHE (arXiv 2310.07911) names both as baselines.
Deviations:
    - Padding does not mix in, and a row's result does not depend on how far its batch is padded. The official code lets padding
      take part in the mixing.
    - The backbone's dropout behind the sublayer stays; the official code has none there.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from suite.attention.base import Options, Start, Variant
from suite.backbones.base import AttentionSite, Family


class Mixer(nn.Module):
    """Stands where an attention was; its blocks call it alike."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """(B, L, d) and a mask as attentions get it; (B, L, d) and no probabilities."""
        return self.mix(hidden_states, real_tokens(attention_mask)), None

    @abstractmethod
    def mix(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Mix the tokens of every row.

        Args:
            x: (B, L, d).
            real: (B, L), True where a token is not padding; None = all.

        Returns:
            (B, L, d); what stands at padding has no meaning.
        """


def real_tokens(mask: Tensor | None) -> Tensor | None:
    """Tokens that others may attend to, (B, L), from a mask (B, 1, n, L), boolean or additive; None = all."""
    if mask is None:
        return None
    seen = mask >= 0 if mask.is_floating_point() else mask
    return seen[:, 0].any(dim=1)


class TokenMixer(Variant[Options]):
    """Base of the variants that put mixers in place of attention."""

    families = frozenset({"bert"})
    families_why = "because it mixes all positions, later ones too (it is for encoders alone)"
    start: Start = "scratch"

    @abstractmethod
    def mixer(self, model: PreTrainedModel, site: AttentionSite) -> Mixer:
        """What takes the place of one attention."""

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        for site in list(family.attention_sites(model)):
            model.set_submodule(names[id(site.module)], self.mixer(model, site))
            site.owner.set_submodule(site.o, nn.Identity())

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        return 0

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        return [
            parameter
            for module in model.modules()
            if isinstance(module, Mixer)
            for parameter in module.parameters()
        ]
