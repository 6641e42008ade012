"""Memory and work of an arm before it runs: ZeRO's formulas, and a step on shapes alone.

The step on shapes (`FakeTensorMode`) runs the forward and backward pass of the very arm without
numbers. So every tensor that autograd keeps is counted, by the same counter that watches real steps
on a CPU. Parameters, gradients and Adam's states follow from ZeRO (arXiv 1910.02054, section 3) and
the buffers of DeepSpeed 0.19.8. Per rank of N, with P parameters of which P_t train, and b bytes
each in the forward pass, they are:

    stage 0                 b P        + 8 P_t (moments) + 4 P_t (fp32 copies, bf16 only)
                                       + gradients b P_t (bf16: and 4 P_t)
    stages 1, 2             b P        + (8 + 4) P_t / N + gradients as they come
    stage 3, resident       b (P - P_t) + b P_t / N
                                       + (8 + 4) P_t / N + gradients b P_t / N
                                       + the trained weights that are gathered at the same time
    stage 3, partitioned    b P / N    + (8 + 4) P_t / N + gradients b P_t / N
                                       + all weights that are gathered at the same time

Resident frozen weights are whole on every rank and are never gathered
(`suite.train.frozen_weights`). Under stages 1 to 3 DeepSpeed keeps fp32 copies of what trains, also
where the forward weights are fp32. Stage 3 releases no gathered weight that is used again within
`LIVE_ELEMENTS` parameters: a model below that size keeps all of them, forward and backward. The
input of a linear map is kept only where its weight trains (`suite.train.linear`).

On a CPU, attention with dropout keeps its probabilities. CUDA's fused kernels keep none; the
estimate for a GPU assumes that they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# torch documents fake tensors under this private name and has no public one.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from suite.backbones.base import Family
from suite.backbones.loading import Head
from suite.meters import TensorPeak
from suite.profiling.arms import ArmChoice
from suite.profiling.batches import forward_options, head_of, training_batch
from suite.profiling.record import Estimate, Memory
from suite.profiling.setting import Setting
from suite.train.engine_config import LIVE_ELEMENTS
from suite.train.frozen_weights import keep_whole, kept_weights
from suite.train.linear import PartitionedLinear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Adam's two moments of a weight in fp32, and the fp32 copy of a weight.
MOMENTS_BYTES = 8
COPY_BYTES = 4
# Kept here because an estimate replaces them for a while.
PLAIN_LINEAR = F.linear
PLAIN_ATTENTION = F.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Step:
    """Bytes that a step on shapes held beside parameters and optimizer, and its operations.

    Attributes:
        kept: Held after the forward pass, for the backward pass.
        weights_kept: Weights that the backward pass needs again; in no other number here.
        peak: Most at once, with every gradient kept.
        peak_without_gradients: Most at once, with each gradient released as soon as it is there.
        forward_flops, total_flops: Operations; a multiply-add counts as two.
    """

    kept: int
    weights_kept: int
    peak: int
    peak_without_gradients: int
    forward_flops: int
    total_flops: int


def estimate(arm: ArmChoice, setting: Setting) -> Estimate:
    """Estimate what training an arm takes on the fullest rank.

    It needs no memory of the model's size and no GPU.
    """
    resolved = arm.resolve()
    model = arm.build(resolved, meta=True)
    return estimate_model(model, resolved.family, head_of(resolved.family), setting)


def estimate_model(
    on_meta: nn.Module, family: Family, head: Head, setting: Setting, *, recompute: bool = False
) -> Estimate:
    """Estimate what training a model takes, as `estimate` does for an arm.

    Args:
        on_meta: The model with its `requires_grad` mask, on the meta device. It is used up.
        family: Its family.
        head: What it ends in: classification, text or masked.
        setting: Shapes, ranks, precision and ZeRO.
        recompute: Whether the blocks' activations are computed again in the backward pass.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as patches:
        model = without_numbers(on_meta, DTYPES[setting.dtype])
        if recompute:
            model.gradient_checkpointing_enable(  # type: ignore[operator]
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        kept: tuple[str, ...] = ()
        if setting.frozen_weights == "resident":
            kept = keep_whole(model, "cpu")
        batch = training_batch(
            family,
            vocabulary_of(model),
            rows=setting.micro,
            tokens=setting.seq,
            target=setting.target,
            head=head,
        )
        if setting.zero == 3:
            patches.enter_context(patched("linear", _linear_of_stage_3))
        if setting.device == "cuda":
            patches.enter_context(patched("scaled_dot_product_attention", _fused_attention))
        step = step_on_shapes(model, batch, forward_options(family))
    resident = sum(_bytes(weight) for weight in kept_weights(model, kept).values())
    # Operations are those of the whole step; memory is that of one rank.
    passes = setting.accumulation * setting.ranks
    return Estimate(
        memory=_memory(model, step, setting, resident=resident),
        forward_flops=step.forward_flops * passes,
        step_flops=step.total_flops * passes,
    )


def vocabulary_of(model: nn.Module) -> int:
    """Number of rows of the input embedding."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def without_numbers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Move a model from the meta device to the CPU without numbers.

    Call it within `FakeTensorMode`. Tensors that modules share stay shared.

    Args:
        dtype: Of every tensor that holds floating-point numbers.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        parameters = list(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = list(module.named_buffers(recurse=False, remove_duplicate=False))
        for name, tensor in [*parameters, *buffers]:
            if id(tensor) not in made:
                made[id(tensor)] = _fake_like(tensor, dtype)
            setattr(module, name, made[id(tensor)])
    return model.train()


def _fake_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        dtype = tensor.dtype
    fake = torch.empty(tensor.shape, dtype=dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


# Without oneDNN, whose LSTM is one operation that no counter of products or tensors looks into.
@torch.backends.mkldnn.flags(enabled=False)
def step_on_shapes(model: nn.Module, batch: dict[str, Tensor], options: dict[str, bool]) -> Step:
    """Run the forward and backward pass, once for each way of counting."""
    kept, peak = _pass(model, batch, options)
    with _gradients_released(model), _kept_weights(model) as weights:
        _, peak_without_gradients = _pass(model, batch, options)
    # The counter does not know every fused kernel, but it knows the products of the plain one.
    plain = patched("scaled_dot_product_attention", PLAIN_ATTENTION)
    with plain, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(**batch, **options).loss
        forward_flops = counter.get_total_flops()
        loss.backward()
    model.zero_grad(set_to_none=True)
    return Step(
        kept=kept,
        weights_kept=sum(weights.values()),
        peak=peak,
        peak_without_gradients=peak_without_gradients,
        forward_flops=forward_flops,
        total_flops=counter.get_total_flops(),
    )


def _pass(model: nn.Module, batch: dict[str, Tensor], options: dict[str, bool]) -> tuple[int, int]:
    """Count the bytes beside the parameters: after the forward pass, and most at once."""
    watch = TensorPeak(of=[*model.parameters(), *model.buffers()])
    states = watch.live_bytes
    with watch:
        loss = model(**batch, **options).loss
        kept = watch.live_bytes - states
        loss.backward()
        peak = watch.peak_bytes - states
    model.zero_grad(set_to_none=True)  # the next pass starts without gradients, too
    return kept, peak


@contextmanager
def _kept_weights(model: nn.Module) -> Iterator[dict[torch.UntypedStorage, int]]:
    """Bytes, by storage, of the parameters that the backward pass needs.

    These are the parameters that train, and within the block those that autograd keeps.
    """
    own = set()
    kept = {}
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        own.add(storage)
        if parameter.requires_grad:
            kept[storage] = _bytes(parameter)

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # a view of a weight has the weight's storage
        if storage in own:
            kept[storage] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        yield kept


@contextmanager
def _gradients_released(model: nn.Module) -> Iterator[None]:
    """Release each gradient as soon as it is there: ZeRO moves it to where it is reduced."""

    def release(parameter: Tensor) -> None:
        parameter.grad = None

    with ExitStack() as hooks:
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(release))
        yield


def _linear_of_stage_3(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # The names of PyTorch's own parameters, because some of peft's layers call it by keyword.
    # Only parameters are partitioned; resident frozen weights are buffers by now.
    if isinstance(weight, nn.Parameter):
        product: Tensor = PartitionedLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, bias
        )
        return product
    return PLAIN_LINEAR(input, weight, bias)


class _FusedAttention(torch.autograd.Function):
    """Keeps what CUDA's fused kernels keep: query, key, value, output and a number for each row.

    They keep no probabilities and no dropout mask.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        row_sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, out, row_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_inputs: list[Tensor | None] = [None, None, None, None]
        # Read once: checkpointing computes them again and gives them out a single time.
        saved = ctx.saved_tensors
        for i in range(4):
            if ctx.needs_input_grad[i]:
                # Shapes are all that is counted, so any numbers will do.
                of_inputs[i] = torch.empty_like(saved[i])
        return tuple(of_inputs)


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_options: Any
) -> Tensor:
    out: Tensor = _FusedAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, attn_mask
    )
    return out


@contextmanager
def patched(name: str, function: Any) -> Iterator[None]:
    """Replace `torch.nn.functional.<name>` within the block."""
    before = getattr(F, name)
    setattr(F, name, function)
    try:
        yield
    finally:
        setattr(F, name, before)


def _memory(model: nn.Module, step: Step, setting: Setting, *, resident: int) -> Memory:
    """Compute the table of the module's docstring, and what a step holds beside it.

    Args:
        model: Its parameters are what DeepSpeed sees.
        step: What a step on shapes held.
        setting: Ranks, precision and ZeRO.
        resident: Bytes of the frozen weights that DeepSpeed does not see.
    """
    whole = 0
    largest = 0
    trained = 0
    for parameter in model.parameters():
        size = _bytes(parameter)
        whole += size
        largest = max(largest, size)
        if parameter.requires_grad:
            trained += parameter.numel()
    width = DTYPES[setting.dtype].itemsize
    n = setting.ranks

    # Stage 0 in fp32 trains the forward weights themselves, without a copy.
    state_bytes = MOMENTS_BYTES
    if setting.zero > 0 or setting.dtype == "bf16":
        state_bytes += COPY_BYTES
    optimizer = trained * state_bytes
    gradients = trained * width
    parameters = resident + whole
    gathered = 0
    if setting.zero == 0:
        if setting.dtype == "bf16":
            gradients += trained * COPY_BYTES
        beside = max(_step_bytes(step, setting, gradients), gradients)
        held = parameters + optimizer
    else:
        optimizer //= n
        gradients //= n
        # The update flattens the gradients of this rank's share into an fp32 copy.
        flattened = trained * COPY_BYTES // n
        if setting.zero < 3:
            beside = max(_step_bytes(step, setting, gradients), flattened)
            held = parameters + optimizer
        else:
            beside, gathered = _stage_3_bytes(step, setting, whole=whole, largest=largest)
            beside = max(beside, flattened)
            parameters = resident + whole // n
            held = parameters + optimizer + gradients
    return Memory(
        peak_bytes=held + beside,
        parameters_bytes=parameters,
        optimizer_bytes=optimizer,
        gradients_bytes=gradients,
        activations_bytes=step.kept + gathered,
    )


def _step_bytes(step: Step, setting: Setting, gradients: int) -> int:
    """Most bytes of a step below stage 3; from its second pass on, gradients exist already."""
    if setting.accumulation > 1:
        return step.peak + gradients
    return step.peak


def _stage_3_bytes(step: Step, setting: Setting, *, whole: int, largest: int) -> tuple[int, int]:
    """Bytes beside the partitioned states: most at once, and weights gathered after forward.

    One rank owns every weight and gathers nothing. Several ranks each hold the weights that the
    backward pass needs, and what is prefetched; or, at the first module, the largest weight and
    the share that it came from.
    """
    if setting.ranks == 1:
        return step.peak_without_gradients, 0
    width = DTYPES[setting.dtype].itemsize
    # Beyond this bound DeepSpeed releases weights, and gathers them again when they are needed.
    gathered = min(step.weights_kept, LIVE_ELEMENTS * width)
    prefetched = min(whole, setting.training.reduce_bucket_elements * width)
    at_first_module = largest + largest // setting.ranks
    most = max(gathered + step.peak_without_gradients, at_first_module) + prefetched
    return most, gathered


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
