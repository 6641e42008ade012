"""A backbone without its last layers.

READ-large is T5-large less four layers of the encoder and four of the decoder.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from suite.config.sweep import BackboneChoice
from suite.errors import ConfigError

DEPTHS = ("num_hidden_layers", "num_decoder_layers")
"""The names by which every family's configuration gives the number of layers of its stacks."""


def shorten(config: PreTrainedConfig, choice: BackboneChoice, *, where: str) -> PreTrainedConfig:
    """Drop the last `choice.drop_layers` layers of every stack from the configuration.

    The configuration is changed in place and returned. The checkpoint may have weights for the
    dropped layers; nobody asks for them.

    Raises:
        ConfigError: No layer would be left.
    """
    # encoder-only and decoder-only models have the first key alone
    for key in DEPTHS:
        depth = getattr(config, key, None)
        if depth is None or not choice.drop_layers:
            continue
        if choice.drop_layers >= depth:
            raise ConfigError(
                f"{where}backbone {choice.name}: got drop_layers {choice.drop_layers}, but its"
                f" stacks have {depth} layers ({key}); at least one must be left"
            )
        setattr(config, key, depth - choice.drop_layers)
    known: Any = config
    # some families (Qwen, Gemma, ModernBERT) also list what each layer sees
    if getattr(known, "layer_types", None) is not None:
        known.layer_types = known.layer_types[: known.num_hidden_layers]
    return config
