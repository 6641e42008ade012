"""`suite.load`: a model and its tokenizer from a folder that `suite export` wrote."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from suite.backbones.loading import build
from suite.export.adapter import load_adapter
from suite.export.base import open_base, open_tokenizer
from suite.export.description import Description, read_description
from suite.export.own import load_own


def load(folder: str | Path) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer.

    The model is in evaluation mode, on the CPU, in the precision that it was trained in. Nothing
    is unpickled. No code of the folder runs, unless the caller names it by `FOLDER@DIGEST` in
    `suite.config.trust.trusting`. A base that is not in the folder comes from the hub's cache, the
    hub or a Python package, at the revision that was trained on.

    Args:
        folder: A folder that `suite export` wrote.

    Raises:
        ConfigError: It is not such a folder.
        BackboneError: The base cannot be found, is not the one that was trained on, or brings code
            that the caller does not trust.
        CheckpointError: The tensors do not fit.
    """
    folder = Path(folder)
    return load_model(read_description(folder), folder), open_tokenizer(folder)


def load_model(description: Description, folder: Path) -> nn.Module:
    """Load the model without its tokenizer."""
    if description.format == "suite":
        model = load_own(description, folder)
    elif description.format == "peft":
        model = load_adapter(description, folder)
    else:
        model = build(open_base(description, folder), description.made_head)
        model.to(getattr(torch, description.dtype))
    return model.eval()  # dropout off: the user may only want answers
