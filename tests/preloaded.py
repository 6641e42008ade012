"""What the server of `tests.ranks` imports once, so that no fork of it has to."""

import deepspeed
import torch

import suite.profiling.worker
import suite.train.loop
from tests.test_parity import model_of

__all__ = ["deepspeed", "suite"]

torch.set_num_threads(1)
model_of("lora", "bert")  # builds a model: transformers imports a family's code on first use
