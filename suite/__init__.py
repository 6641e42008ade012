"""A benchmark suite for attention variants and parameter-efficient transfer learning, on Ray."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def load(folder: Any) -> Any:
    """Load a model from a folder that `suite export` wrote.

    Args:
        folder: Path of the folder.

    Returns:
        A `suite.export.load.Loaded`: `predict(texts)`, and `model` (a torch module in evaluation
        mode on the CPU) and `tokenizer` (of transformers), which it also unpacks to.
    """
    # imported here, because it imports torch: `import suite` must stay quick
    return import_module("suite.export").load(folder)
