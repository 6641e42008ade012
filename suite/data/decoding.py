"""How a text is searched: as the task and the sweep say, whatever a checkpoint says.

A checkpoint's `generation_config.json` may punish repetitions, forbid tokens or name other ends,
and `generate` takes from there whatever a call leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedTokenizerBase,
)


@contextmanager
def own_decoding(
    model: Any, tokenizer: PreTrainedTokenizerBase, *, pad_id: int
) -> Iterator[dict[str, Any]]:
    """Within the block the model's own settings for `generate` are special tokens and no more.

    Args:
        model: The model that writes.
        tokenizer: Its end token ends a text, as it ends the targets.
        pad_id: What stands after the end of a shorter text.

    Yields:
        What else `generate` must be given.
    """
    # peft's wrapper calls the model inside, which reads its own.
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    own = model.generation_config
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        pad_token_id=pad_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # encoder-decoders alone have one; the loss shifts its labels by the same
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )
    options = {}
    # transformers 5 makes a cache of as many layers as the encoder has; an empty one grows
    if getattr(model.config, "num_decoder_layers", 0) > model.config.num_hidden_layers:
        options["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    try:
        yield options
    finally:
        # an export writes them as they came
        model.generation_config = own
