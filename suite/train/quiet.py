"""Hide a line of DeepSpeed's log that tells the user nothing."""

from __future__ import annotations

import logging

NO_GPU = "Setting accelerator to CPU."
"""How the line begins. `suite doctor` says which GPUs there are, and a trial's log where it ran."""


def quieten_deepspeed() -> None:
    """Drop the line in which DeepSpeed says that it found no GPU.

    It comes when DeepSpeed is imported, which transformers and peft also do when they save a model.
    """
    # A filter that the logger already has is not added again.
    logging.getLogger("DeepSpeed").addFilter(_tells_something)


def _tells_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NO_GPU)
