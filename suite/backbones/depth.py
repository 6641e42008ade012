"""How many layers a backbone has: at most so many, and without its last ones where that is asked.

READ-large is T5-large less four layers of the encoder and four of the decoder.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from suite.config.sweep import BackboneChoice
from suite.errors import ConfigError

DEPTHS = ("num_hidden_layers", "num_decoder_layers")
"""The names by which every family's configuration gives the number of layers of its stacks."""

MOST_LAYERS = 500
"""The most layers of a stack. The deepest published model has 500 in each of two stacks (DeepNet,
arXiv 2203.00555), and a plan builds every layer of every arm."""


def check_depth(config: PreTrainedConfig, *, where: str) -> None:
    """Refuse a configuration whose layers nobody could build in a reader's time.

    Raises:
        ConfigError: A stack has more than `MOST_LAYERS` layers.
    """
    for key in DEPTHS:
        depth = getattr(config, key, None)
        if isinstance(depth, int) and depth > MOST_LAYERS:
            raise ConfigError(
                f"{where}got {depth} layers in a stack ({key}), expected at most {MOST_LAYERS}"
            )


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
