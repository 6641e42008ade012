"""A backbone without its last layers: READ-large is T5-large less four layers of the encoder and four of the decoder."""

from __future__ import annotations

from transformers import PreTrainedConfig

from suite.config.sweep import BackboneChoice
from suite.errors import ConfigError

DEPTHS = ("num_hidden_layers", "num_decoder_layers")
"""Where a configuration says how many layers its stacks have, by the names that all families understand."""


def shorten(config: PreTrainedConfig, choice: BackboneChoice, *, where: str) -> PreTrainedConfig:
    """The same configuration without the last `choice.drop_layers` of every stack: a checkpoint is not asked for their weights.

    Raises:
        ConfigError: No layer would be left.
    """
    for key in DEPTHS:
        depth = getattr(config, key, None)
        if depth is None or not choice.drop_layers:
            continue
        if choice.drop_layers >= depth:
            got = (
                f"got drop_layers {choice.drop_layers}, but its stacks have {depth} layers ({key})"
            )
            raise ConfigError(f"{where}backbone {choice.name}: {got}; at least one must be left")
        setattr(config, key, depth - choice.drop_layers)
    return config
