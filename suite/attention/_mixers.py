"""Token mixers: an encoder mixes all tokens in place of attention and its output projection.

Source: FNet, arXiv 2105.03824, section 3; its official code. MHE (arXiv 2310.07911) names both as
    baselines.
Deviations:
    - Padding does not mix in, and a row's result does not depend on how far its batch is padded.
      The official code lets padding take part in the mixing.
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
    """Takes the place of an attention; its block calls it in the same way."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Mix (B, L, d) under the mask that attentions get.

        Returns:
            (B, L, d), and None in place of attention probabilities.
        """
        return self.mix(hidden_states, real_tokens(attention_mask)), None

    @abstractmethod
    def mix(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Mix the tokens of every row.

        Args:
            x: (B, L, d).
            real: (B, L), True where a token is not padding; None = no token is padding.

        Returns:
            (B, L, d); the numbers at padding have no meaning.
        """


def real_tokens(mask: Tensor | None) -> Tensor | None:
    """The tokens that others may attend to, (B, L); None = all.

    Args:
        mask: (B, 1, n, L), boolean (True = may attend) or additive (0 = may attend).
    """
    if mask is None:
        return None
    may_attend = mask >= 0 if mask.is_floating_point() else mask
    return may_attend[:, 0].any(dim=1)  # (B, L)


class TokenMixer(Variant[Options]):
    """Base of the variants that put mixers in place of attention."""

    kinds = frozenset({"encoder"})
    families_why = "because it mixes all positions, later ones too (it is for encoders alone)"
    start: Start = "scratch"

    @abstractmethod
    def mixer(self, model: PreTrainedModel, site: AttentionSite) -> Mixer:
        """Make the mixer that takes the place of one attention."""

    def convert(self, model: PreTrainedModel, family: Family) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        # a list, because attention_sites no longer finds a site that has become a mixer
        for site in list(family.attention_sites(model)):
            model.set_submodule(names[id(site.module)], self.mixer(model, site))
            site.owner.set_submodule(site.o, nn.Identity())

    def cached_floats(self, site: AttentionSite, family: Family) -> int:
        return 0

    def extra_parameters(self, model: PreTrainedModel, family: Family) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        for module in model.modules():
            if isinstance(module, Mixer):
                found.extend(module.parameters())
        return found
