"""LoRA+ and LoRA-FA: optimizers of peft on the suite's AdamW, which runs under every ZeRO stage.

Source: LoRA+, arXiv 2402.12354; LoRA-FA, arXiv 2308.03303; both in `peft.optimizers`.
Deviations:
    - LoRA+: parameters are grouped as peft groups them (B, biases and norms learn faster than A and
      the matrix of a task head), but all of them decay by `training.weight_decay`, as in every arm.
    - LoRA-FA: A is frozen, and B's gradient is multiplied by (A Aᵀ)⁻¹ / scale², as in peft, but by
      a hook on the gradient: clipping sees the corrected gradient, peft's the raw one. The product
      is computed in fp32 (peft: bf16 where the machine has it), and AdamW is torch's, which
      corrects the bias before it adds `training.adam_eps` (peft: after it, 1e-6).
"""

from __future__ import annotations

from typing import Any

import torch
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

MOST_RATIO = 1000.0
"""How many times faster B may learn than A (ours)."""
DAMPING = 1e-8
"""Added to the diagonal of A Aᵀ (peft's `LoraFAOptimizer`)."""


def loraplus_factors(model: Any, ratio: float) -> dict[str, float]:
    """By what LoRA+ multiplies the learning rate of each parameter, as peft groups them.

    Args:
        model: peft's model.
        ratio: λ, the learning rate of B over that of A.
    """
    # peft has no function that only groups; its optimizer is made for its groups and thrown away
    optimizer = create_loraplus_optimizer(
        model, torch.optim.SGD, lr=1.0, loraplus_lr_ratio=ratio, loraplus_lr_embedding=1.0
    )
    rates = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rates[id(parameter)] = group["lr"]
    factors = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            factors[name] = rates[id(parameter)]
    return factors


def freeze_a(model: nn.Module) -> None:
    """Freeze every A, and correct the gradient of every B by it."""
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        layer: Any = module
        for name, a in layer.lora_A.items():
            a.weight.requires_grad_(False)
            # shapes alone have no gradient
            if not a.weight.is_meta:
                correction = _Correction(a.weight, layer.scaling[name])
                layer.lora_B[name].weight.register_hook(correction)


class _Correction:
    """Multiplies B's gradient, (out, r), by (A Aᵀ)⁻¹ / scale².

    With it a step of B is the best approximation of a step of the whole weight. It is linear, so
    the mean over micro-batches and ranks may be taken before or after it.
    """

    def __init__(self, a: Tensor, scale: float) -> None:
        wide = a.detach().float()  # (r, in)
        products = wide @ wide.T + DAMPING * torch.eye(len(wide), device=wide.device)
        # once, because A never changes
        self.matrix = torch.linalg.pinv(products) / scale**2  # (r, r)

    def __call__(self, gradient: Tensor) -> Tensor:
        # the device is known only in training
        self.matrix = self.matrix.to(gradient.device)
        corrected: Tensor = (gradient.float() @ self.matrix).to(gradient.dtype)
        return corrected
