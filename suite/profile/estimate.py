"""Memory and work of an arm before it runs: states by ZeRO's formulas, activations and FLOPs by a step on shapes alone.

The step on shapes (`FakeTensorMode`) executes forward and backward pass of the very arm without numbers, so that every tensor that
autograd keeps is counted, by the same counter that watches real steps on a CPU. Parameters, gradients and Adam's states are not
taken from it but from what ZeRO (arXiv 1910.02054, section 3) and DeepSpeed 0.19.8's buffers come to, per rank of N, with P
parameters of which P_t train, b bytes each in the forward pass:

    stage 0       b P        + 8 P_t (moments)      + 4 P_t (fp32 copies, bf16 only)  + gradients b P_t (bf16: and 4 P_t)
    stages 1, 2   b P        + (8 + 4) P_t / N      + gradients as they come
    stage 3       b P / N    + (8 + 4) P_t / N      + gradients b P_t / N + the weights that are gathered at the same time

DeepSpeed keeps fp32 copies of what trains under stages 1 to 3 also where the forward weights are fp32, and stage 3 lets go of no gathered
weight that is used again within 10^9 parameters: in models below that size all of them stay, forward and backward. Its `linear` keeps the
input of every map for the backward pass, also where the map is frozen and plain autograd would not: LoRA's activations grow by it.

On a CPU attention with dropout keeps its probabilities. CUDA's fused kernels keep none, and the estimate for a GPU takes them to be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from suite.meters import TensorPeak
from suite.profile.arms import ArmChoice
from suite.profile.batches import forward_options, training_batch
from suite.profile.record import Estimate, Memory
from suite.profile.setting import Setting

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOMENTS_BYTES, COPY_BYTES = 8, 4
LIVE_ELEMENTS = 10**9
"""DeepSpeed's stage3_max_live_parameters and stage3_max_reuse_distance, which the suite leaves as they are."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step on shapes held beside parameters and optimizer, in bytes.

    Attributes:
        kept: After the forward pass, for the backward pass.
        peak: Most at once, with gradients as they come; `peak_without_gradients` with each let go at once.
        weights_kept: Of weights that the backward pass needs again; in no other number here.
        forward_flops, total_flops: Multiply-adds count twice, as everywhere.
    """

    kept: int
    weights_kept: int
    peak: int
    peak_without_gradients: int
    forward_flops: int
    total_flops: int


def estimate(arm: ArmChoice, setting: Setting) -> Estimate:
    """What training an arm takes on the fullest rank. Needs no memory of the model's size and no GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        resolved = arm.resolve()
        with torch.utils._python_dispatch._disable_current_modes():
            shapes = arm.build(resolved, meta=True)
        model = without_numbers(shapes, DTYPES[setting.dtype])
        batch = training_batch(
            resolved.family,
            vocabulary_of(model),
            rows=setting.micro,
            tokens=setting.seq,
            target=setting.target,
        )
        with ExitStack() as patches:
            if setting.zero == 3:
                patches.enter_context(patched("linear", _LinearOfStage3.apply))
            if setting.device == "cuda":
                patches.enter_context(patched("scaled_dot_product_attention", _fused_attention))
            step = step_on_shapes(model, batch, forward_options(resolved.family))
    return Estimate(
        memory=_memory(model, step, setting),
        forward_flops=step.forward_flops * setting.accumulation * setting.ranks,
        step_flops=step.total_flops * setting.accumulation * setting.ranks,
    )


def vocabulary_of(model: nn.Module) -> int:
    """Rows of the input embedding."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def without_numbers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give a model on the meta device parameters and buffers that have a device but no numbers; within `FakeTensorMode`."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is not None:
                    made.setdefault(id(tensor), _like(tensor, dtype))
                    tensors[name] = made[id(tensor)]
    return model.train()


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
    return (
        nn.Parameter(empty, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else empty
    )


def step_on_shapes(model: nn.Module, batch: dict[str, Tensor], options: dict[str, bool]) -> Step:
    """Forward and backward pass, once for each way of counting."""
    kept, peak = _pass(model, batch, options)
    with _gradients_let_go(model), _saved(model) as weights:
        _, without = _pass(model, batch, options)
    plain = patched("scaled_dot_product_attention", torch._C._nn.scaled_dot_product_attention)
    with (
        plain,
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):  # of fused attention the counter knows less
        loss = model(**batch, **options).loss
        forward = counter.get_total_flops()
        loss.backward()
    model.zero_grad(set_to_none=True)
    return Step(kept, sum(weights.values()), peak, without, forward, counter.get_total_flops())


def _pass(model: nn.Module, batch: dict[str, Tensor], options: dict[str, bool]) -> tuple[int, int]:
    """Bytes beside the parameters after the forward pass, and most at once."""
    watch = TensorPeak(of=[*model.parameters(), *model.buffers()])
    states = watch.live_bytes
    with watch:
        loss = model(**batch, **options).loss
        kept = watch.live_bytes - states
        loss.backward()
        peak = watch.peak_bytes - states
    model.zero_grad(set_to_none=True)
    return kept, peak


@contextmanager
def _saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of the parameters that the backward pass needs, by storage: those that autograd keeps, and those that train."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    found = {p.untyped_storage()._cdata: _bytes(p) for p in model.parameters() if p.requires_grad}

    def see(tensor: Tensor) -> Tensor:
        if (key := tensor.untyped_storage()._cdata) in own:
            found[key] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        yield found


@contextmanager
def _gradients_let_go(model: nn.Module) -> Iterator[None]:
    """As ZeRO does, which moves each gradient to where it is reduced."""

    def let_go(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [
        p.register_post_accumulate_grad_hook(let_go) for p in model.parameters() if p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _LinearOfStage3(torch.autograd.Function):
    """Keeps what DeepSpeed's `LinearFunctionForZeroStage3` keeps: input and weight, whichever of them trains."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return x @ weight.t() if bias is None else x @ weight.t() + bias

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (g,), (x, weight, bias) = gradients, ctx.saved_tensors
        of_x = g @ weight if ctx.needs_input_grad[0] else None
        of_weight = g.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return (
            of_x,
            of_weight,
            g.flatten(0, -2).sum(0) if bias is not None and ctx.needs_input_grad[2] else None,
        )


class _FusedAttention(torch.autograd.Function):
    """Keeps what CUDA's fused kernels keep: query, key, value, the output and a number for each row; no probabilities, no dropout mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, mask, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:4]
        return tuple(
            torch.empty_like(x) if needed else None
            for x, needed in zip(inputs, ctx.needs_input_grad, strict=True)
        )


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_options: Any
) -> Tensor:
    out: Tensor = _FusedAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, attn_mask
    )
    return out


@contextmanager
def patched(name: str, function: Any) -> Iterator[None]:
    """`torch.nn.functional.<name>` is another function for the time of the block."""
    before = getattr(F, name)
    setattr(F, name, function)
    try:
        yield
    finally:
        setattr(F, name, before)


def _memory(model: nn.Module, step: Step, setting: Setting) -> Memory:
    """The table of the module's docstring."""
    parameters = list(model.parameters())
    trained, whole = (
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(map(_bytes, parameters)),
    )
    width, n = DTYPES[setting.dtype].itemsize, setting.ranks
    copied = setting.zero > 0 or setting.dtype == "bf16"
    optimizer = (
        trained * (MOMENTS_BYTES + (COPY_BYTES if copied else 0)) // (n if setting.zero else 1)
    )
    if setting.zero == 0:
        gradients = trained * (width + (COPY_BYTES if copied else 0))
        beside, held, gathered = (
            max(step.peak + (gradients if setting.accumulation > 1 else 0), gradients),
            whole + optimizer,
            0,
        )
    else:
        gradients = trained * width // n
        beside, gathered = _under_zero(
            step, setting, whole=whole, largest=max(map(_bytes, parameters)), gradients=gradients
        )
        beside = max(
            beside, trained * COPY_BYTES // n
        )  # in the update they are flattened into a copy
        held = whole // n + optimizer + gradients if setting.zero == 3 else whole + optimizer
    return Memory(
        peak_bytes=held + beside,
        parameters_bytes=whole // n if setting.zero == 3 else whole,
        optimizer_bytes=optimizer,
        gradients_bytes=gradients,
        activations_bytes=step.kept + gathered,
    )


def _under_zero(
    step: Step, setting: Setting, *, whole: int, largest: int, gradients: int
) -> tuple[int, int]:
    """Bytes beside the partitioned states: most at once, and of that the weights still gathered after the forward pass.

    One rank owns every weight and gathers nothing. Of several, each holds the weights that the backward pass needs, and what is
    prefetched; or, at its first module, the largest weight and the share that it came from.
    """
    if setting.zero < 3:
        return step.peak + (gradients if setting.accumulation > 1 else 0), 0
    if setting.ranks == 1:
        return step.peak_without_gradients, 0
    width, n = DTYPES[setting.dtype].itemsize, setting.ranks
    gathered = min(step.weights_kept, LIVE_ELEMENTS * width)
    prefetched = min(whole, setting.training.reduce_bucket_elements * width)
    return max(
        gathered + step.peak_without_gradients, largest + largest // n
    ) + prefetched, gathered


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
