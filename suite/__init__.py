"""A benchmark suite for attention variants and parameter-efficient transfer learning, on Ray."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def load(folder: Any) -> tuple[Any, Any]:
    """Load the model and the tokenizer from a folder that `suite export` wrote.

    Args:
        folder: Path of the folder.

    Returns:
        A torch module in evaluation mode on the CPU, and a tokenizer of transformers.
    """
    # imported here, because it imports torch: `import suite` must stay quick
    loaded: tuple[Any, Any] = import_module("suite.export").load(folder)
    return loaded
