"""What the server of `tests.ranks` imports once, so that no fork of it has to."""

import gc

import deepspeed
import deepspeed.module_inject.auto_ep_config  # the first engine of a process imports these two
import deepspeed.runtime.zero.muon.muon_optimizer
import torch

import suite.profiling.worker
import suite.train.loop
from tests.test_parity import model_of
from tests.tiny import FAMILIES

__all__ = ["deepspeed", "suite"]

torch.set_num_threads(1)
for family in FAMILIES:
    model_of("lora", family)  # builds a model: transformers imports a family's code on first use
# Every engine collects garbage twice: it need not walk over a million objects that stay.
gc.collect()
gc.freeze()
