"""The DeepSpeed ZeRO engine. Only this module and `suite.train.process_group` import deepspeed.

It hides what ZeRO changes about a model (partitioned parameters, collective access, engines that
are never freed) behind whole tensors by name. Every method marked *collective* must be called on
all ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.utils.hooks import RemovableHandle

from suite.backbones.weights import cast_weights
from suite.config.precision import precision_of
from suite.config.training import TrainingConfig
from suite.errors import CheckpointError
from suite.train import linear
from suite.train.engine_config import engine_config
from suite.train.fingerprint import place_sum, together
from suite.train.frozen_weights import copy_beside, keep_whole, kept_weights
from suite.train.pieces import (
    adam_of,
    held_bytes,
    masters_of,
    pieces_of,
    publish,
    set_steps,
    steps_of,
    undo_first_step,
)
from suite.train.process_group import all_agree, gather_objects
from suite.train.shards import Shards, shard_name, stored_buffers, write_shard

if TYPE_CHECKING:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

LocalBatch = tuple[Mapping[str, torch.Tensor], float]


class Engine:
    """One model under ZeRO, reusable for trial after trial of the same arm.

    Args:
        model: A whole model on the CPU with its `requires_grad` mask final. It is partitioned in
            place and must not be used elsewhere any more.
        training: Batch, clipping, precision and ZeRO settings.
        world_size: Ranks of the initialised process group.
        device: "cuda" or "cpu".
        lanes: Whether `beside` may be called: keeps a copy of what trains.
        factors: By what the learning rate is multiplied for the parameters of these names.
    """

    def __init__(
        self,
        model: nn.Module,
        training: TrainingConfig,
        *,
        world_size: int,
        device: str,
        lanes: bool = False,
        factors: Mapping[str, float] | None = None,
        _kept_names: tuple[str, ...] = (),
    ) -> None:
        import deepspeed

        self.training = training
        self.world_size = world_size
        self.device = device
        self.precision = precision_of(training, device)
        self.config = engine_config(training, world_size=world_size, device=device)
        self.trained_names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._factors = dict(factors or {})
        groups = _groups(model, self._factors)
        offloaded = device == "cuda" and training.offload != "none"
        optimizer = _adamw(groups, training, offloaded=offloaded)
        # Before ZeRO copies the parameters: its flat buffers take their dtype from them.
        dtype = torch.float32
        if self.precision == "bf16":
            dtype = torch.bfloat16
        cast_weights(model, dtype)
        self.kept_names = _kept_names
        if training.frozen_weights != "partitioned" and not _kept_names:
            self.kept_names = keep_whole(model, device)
        # A copy is possible only before DeepSpeed has put its hooks on the modules.
        self._template: nn.Module | None = None
        if lanes and self.kept_names:
            self._template = copy_beside(model)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.config, dist_init_required=False
        )
        if training.zero_stage == 0:
            undo_first_step(self._engine.optimizer)
        self._partitions = training.zero_stage == 3
        self._is_whole = False
        if self._partitions:
            linear.use()
            zero_optimizer: Any = self._engine.optimizer
            _unhook(model, zero_optimizer.parameter_offload)
        # Of the frozen weights; no training changes it, which the end of every trial checks.
        self.frozen_fingerprint = self.fingerprint(trained=False)
        # A setting that DeepSpeed overlooks would silently clip at its own default, 1.0.
        if self._engine.gradient_clipping() != training.gradient_clipping:
            raise AssertionError("DeepSpeed did not take the gradient clipping it was given")

    @property
    def module(self) -> nn.Module:
        """The model, for evaluation and generation; its parameters may be partitioned."""
        module: nn.Module = self._engine.module
        return module

    def step(
        self,
        batches: Sequence[LocalBatch],
        learning_rate: float,
        *,
        mark: Callable[[str], None] | None = None,
    ) -> torch.Tensor:
        """Take one optimizer step over this rank's micro-batches. Collective.

        Args:
            batches: Model inputs with their weight. The loss of the step is the mean of weight x
                loss over micro-batches and ranks, so that unequal parts (tokens) still give the
                gradient of the whole batch's mean.
            learning_rate: Learning rate of this step.
            mark: Called after each part of a micro-batch: forward, backward, update.

        Returns:
            This rank's part of the step's loss, detached, on the device.
        """
        self.set_learning_rate(learning_rate)
        total = torch.zeros((), device=self.device)
        for batch, weight in batches:
            total += self.micro_step(batch, weight, mark=mark)
        # DeepSpeed divides the gradients by the number of micro-batches as well.
        return total / len(batches)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next step."""
        assert self._engine.optimizer is not None
        # The loop owns the schedule; DeepSpeed has none that could go out of step.
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["factor"]

    def micro_step(
        self,
        batch: Mapping[str, torch.Tensor],
        weight: float,
        *,
        mark: Callable[[str], None] | None = None,
    ) -> torch.Tensor:
        """Take one micro-batch of a step; the last one of a step updates the weights. Collective.

        Returns:
            Its weighted loss, detached, on the device.
        """
        mark = mark or _unmarked
        loss: torch.Tensor = self._engine(**batch).loss * weight
        mark("forward")
        self._engine.backward(loss)
        mark("backward")
        # DeepSpeed counts the micro-batches and updates the weights after the last one of a step.
        self._engine.step()
        mark("update")
        return loss.detach().float()

    @property
    def skipped_steps(self) -> int:
        """Steps without an update, since their gradient was not finite; the same on all ranks.

        DeepSpeed skips them in silence. At stage 0 in fp32 such a gradient reaches the weights.
        """
        return int(self._engine.skipped_steps)

    @property
    def is_finite(self) -> bool:
        """Whether the trained weights that this rank holds whole are finite.

        At stage 3 it holds none: there no gradient that is not finite reaches them.
        """
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return bool(torch.stack([torch.isfinite(p).all() for p in trained]).all())

    @property
    def gathers(self) -> bool:
        """Whether a forward pass gathers weights, so that all ranks must make the same number."""
        return self._partitions and not self._is_whole

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gather all weights once, for any number of forward passes without gradients. Collective.

        Within the block no module gathers weights or gives them back. They must not change in it.
        Below ZeRO 3 they are whole in any case.
        """
        if not self._partitions:
            yield
            return
        # A pass may have left weights gathered, or on their way, for the next one.
        self._engine.empty_partition_cache()
        zero_optimizer: Any = self._engine.optimizer
        offload: DeepSpeedZeRoOffload = zero_optimizer.parameter_offload
        hooks = (offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks)
        with self._gathered(self.module.parameters()), _taken_away(hooks):
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False

    @contextmanager
    def whole_peft_layers(self) -> Iterator[int]:
        """Gather once what most layers of `peft` hold, for passes without gradients. Collective.

        A module's hooks gather its own weights when somebody calls it. Such a layer also reads
        weights of modules that nobody calls: those of a `ParameterDict`, or the shape of
        `lora_A.weight`. DeepSpeed notices that only while the whole model is called, and
        `generate` calls parts of it. Plain LoRA does not, and all other weights are gathered as
        ever.

        Yields:
            The bytes of what is whole within the block.
        """
        owners = []
        if self._partitions:
            owners = _read_from_outside(self.module)
        if not owners:
            yield 0
            return
        # In one order on all ranks, which a set of parameters has not.
        read: dict[nn.Parameter, None] = {}
        for module in owners:
            read |= dict.fromkeys(module.parameters(recurse=False))
        self._engine.empty_partition_cache()
        zero_optimizer: Any = self._engine.optimizer
        with (
            self._gathered(read),
            _taken_away(_hooks_around(owners, zero_optimizer.parameter_offload)),
        ):
            yield sum(whole_numel(parameter) * parameter.element_size() for parameter in read)

    @property
    def has_lanes(self) -> bool:
        """Whether `beside` may be called."""
        return self._template is not None

    def beside(self) -> Engine:
        """Make an engine with weights and an optimizer of its own over the same frozen tensors.

        Collective.
        """
        assert self._template is not None, "the engine was made without lanes"
        return Engine(
            copy_beside(self._template),
            self.training,
            world_size=self.world_size,
            device=self.device,
            factors=self._factors,
            _kept_names=self.kept_names,
        )

    def save(self, folder: Path, *, alone: bool = False) -> Path:
        """Write this rank's share of the trained parameters and of the optimizer's state.

        Frozen weights are never written.

        Args:
            alone: Write all that this rank holds, even if other ranks hold it too: it will read
                this file and no other.

        Returns:
            The file, in `folder`.
        """
        rank = dist.get_rank()
        optimizer = self._engine.optimizer
        adam = adam_of(optimizer)
        pieces = []
        for piece in pieces_of(self.module, optimizer, rank=rank):
            own = piece
            if piece.everywhere and not alone:
                own = piece.share(rank, self.world_size)
            if own.length > 0:
                pieces.append(own)
        buffers = {}
        # Buffers are the same on all ranks.
        if alone or rank == 0:
            buffers = stored_buffers(self.module)
        path = folder / shard_name(rank)
        write_shard(
            path,
            pieces,
            adam.state,
            steps=steps_of(adam),
            buffers=buffers,
        )
        return path

    def load(self, folder: Path, *, written_by: int | None = None, alone: bool = False) -> None:
        """Bring back everything that `save` wrote, on any number of ranks. Collective.

        Args:
            folder: Holds the files of all ranks that wrote.
            written_by: Number of ranks that wrote; None = as many as now.
            alone: Read only the file that this rank wrote, in a group of this size.

        Raises:
            CheckpointError: Not every rank could load; the engine is of no use any more.
        """
        names = [shard_name(rank) for rank in range(written_by or self.world_size)]
        if alone:
            names = [shard_name(dist.get_rank())]
        cause: BaseException | None = None
        try:
            with Shards([folder / name for name in names]) as shards:
                if not alone:
                    # A file of this rank alone may be a part, and would fail the check.
                    shards.check({name: whole_numel(p) for name, p in self._trained()})
                self._take(shards)
        except (OSError, RuntimeError, KeyError, ValueError, SafetensorError) as error:
            # Kept until all have voted: a rank that raises alone leaves the others waiting.
            cause = error
        if not all_agree(cause is None):
            # Another rank may have failed, and knows why.
            why = ""
            if cause is not None:
                why = f": {cause}"
            raise CheckpointError(f"{folder}: could not be loaded on every rank{why}") from cause
        publish(self._engine.optimizer)
        self._leave_partitioned(False)

    def _take(self, shards: Shards) -> None:
        self._leave_partitioned(True)
        adam = adam_of(self._engine.optimizer)
        pieces = pieces_of(self.module, self._engine.optimizer, rank=dist.get_rank())
        # Adam has no state before its first step, and `read` needs one to fill.
        set_steps(adam, masters_of(self.module, self._engine.optimizer), shards.steps)
        shards.read(pieces, adam.state)
        for name, buffer in stored_buffers(self.module).items():
            buffer.copy_(shards.buffers[name])

    def _leave_partitioned(self, begin: bool) -> None:
        """Give back the parameters that ZeRO-3 keeps gathered, or fetch them again.

        They are given back before the weights change and fetched after.
        """
        optimizer: Any = self._engine.optimizer
        if self.training.zero_stage != 3:
            return
        if begin:
            optimizer.checkpoint_event_prologue()
        else:
            optimizer.checkpoint_event_epilogue()

    def trained_state(self) -> dict[str, torch.Tensor]:
        """Trained tensors by name, whole, fp32 on the CPU; empty except on rank 0. Collective."""
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self._trained():
            # One at a time, so that no device must hold all of them whole at once.
            with self._gathered([parameter]):
                if dist.get_rank() == 0:
                    state[name] = parameter.detach().to("cpu", torch.float32, copy=True)
        return state

    def load_trained(self, state: Mapping[str, torch.Tensor]) -> None:
        """Write whole trained tensors into the forward weights. Collective.

        This is for evaluation, not for further training: the optimizer's copies stay as they are.

        Args:
            state: As `trained_state` returns it; only rank 0's is read.
        """
        for name, parameter in self._trained():
            with self._gathered([parameter], modifier_rank=0), torch.no_grad():
                if dist.get_rank() == 0:
                    parameter.copy_(state[name])
                # Under ZeRO 3 the end of the block sends rank 0's values to all; here nobody would.
                if self.training.zero_stage != 3:
                    dist.broadcast(parameter.data, src=0)

    def fingerprint(self, *, trained: bool) -> str:
        """Fingerprint of the trained or the frozen forward weights. Collective.

        It is the same on any number of ranks (`suite.train.fingerprint`). Where ranks disagree on a
        weight that each of them holds whole, it is a fingerprint that no weights have.
        """
        sums: dict[str, int] = {}
        sizes: dict[str, int] = {}
        wholes: dict[str, int] = {}
        for name, weight in self._weights(trained=trained):
            sizes[name] = whole_numel(weight)
            local, start = _local_run(weight)
            if start == 0 and len(local) == sizes[name]:
                # Every rank holds it, or ZeRO cut it and it is so small that rank 0 has all of it.
                wholes[name] = place_sum(local, 0)
            elif len(local):
                sums[name] = place_sum(local, start)
        parts = gather_objects((sums, wholes))
        found = []
        agreed: dict[str, int] = {}
        for sums_there, wholes_there in parts:
            found.append(sums_there)
            for name, value in wholes_there.items():
                if agreed.setdefault(name, value) != value:
                    # Counted twice, so that whoever compares finds another fingerprint.
                    found.append({name: value})
        return together([*found, agreed], sizes)

    def numel(self, *, trained_only: bool = False) -> int:
        """Count the parameters before partitioning; one that is shared counts once."""
        total = 0
        for _, weight in self._weights(trained=True):
            total += whole_numel(weight)
        if not trained_only:
            for _, weight in self._weights(trained=False):
                total += whole_numel(weight)
        return total

    def held_bytes(self) -> tuple[int, int]:
        """Bytes that this rank holds between two steps, as `pieces.held_bytes` counts them."""
        kept = kept_weights(self.module, self.kept_names)
        return held_bytes(self.module, self._engine.optimizer, kept.values())

    def kept_bytes(self) -> int:
        """Bytes of the frozen weights that every rank keeps; the engines `beside` share them."""
        return sum(weight.nbytes for weight in kept_weights(self.module, self.kept_names).values())

    def whole_bytes(self) -> int:
        """Bytes that this rank holds within `whole_weights`, beside those of `kept_bytes`.

        They are those of the estimate (`suite.profiling.estimate`): this rank's share of weights,
        gradients, fp32 copies and moments, and the weights that are gathered.
        """
        _, total = held_bytes(self.module, self._engine.optimizer)
        for parameter in self.module.parameters():
            share = len(_local_run(parameter)[0])
            numel = whole_numel(parameter) + share
            if parameter.requires_grad:
                # Its gradient.
                numel += share
            total += numel * parameter.element_size()
        return total

    def check_mask(self) -> None:
        """Check that `requires_grad` is what it was at the start.

        A parameter that is unfrozen later would never train, and nothing would say so.
        """
        now = [name for name, p in self.module.named_parameters() if p.requires_grad]
        if now != self.trained_names:
            changed = sorted(set(now) ^ set(self.trained_names))
            raise AssertionError(f"requires_grad changed after the engine was built: {changed[:5]}")

    def release(self) -> None:
        """Free the engine.

        `destroy()` alone leaks every ZeRO-3 engine through two of DeepSpeed's globals.
        """
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partitioned_param_coordinator import (
            PartitionedParameterCoordinator,
        )

        self._engine.destroy()
        if self._partitions:
            linear.leave()
        # A list of modules that is never popped, and a cache that holds the coordinator.
        parameter_offload.FWD_MODULE_STACK.clear()
        _clear_caches(PartitionedParameterCoordinator)
        del self._engine
        # Whoever holds the engine a little longer would hold these tensors too.
        self._template = None
        gc.collect()

    def _weights(self, *, trained: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that train, or the frozen ones, parameters or not; a shared one once."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad == trained:
                yield name, parameter
        if not trained:
            yield from kept_weights(self.module, self.kept_names).items()

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    @contextmanager
    def _gathered(
        self, parameters: Iterable[nn.Parameter], modifier_rank: int | None = None
    ) -> Iterator[None]:
        import deepspeed

        # Below ZeRO 3 every rank has whole parameters, and nothing is to be gathered.
        with deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=modifier_rank, enabled=self.training.zero_stage == 3
        ):
            yield


def _unhook(model: nn.Module, offload: DeepSpeedZeRoOffload) -> None:
    """Take ZeRO-3's hooks from the modules that hold no parameter of their own.

    DeepSpeed puts four around every module, and those around a container or a frozen layer gather
    nothing, in every forward pass and for every generated token.
    """
    idle = []
    for module in model.modules():
        # The whole model's hooks begin and end a pass.
        if module is not model and next(module.parameters(recurse=False), None) is None:
            idle.append(module)
    for handle in _hooks_around(idle, offload):
        handle.remove()


def _read_from_outside(model: nn.Module) -> list[nn.Module]:
    """The modules of which a layer of `peft` may read weights without calling them.

    They are those of all layers but plain LoRA's, those that hold something else that trains,
    because some layers share such weights, and all that share a weight with one of these.
    """
    # A method of `peft` has imported it by now.
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    read: set[nn.Parameter] = set()
    for layer in model.modules():
        is_plain = False
        if isinstance(layer, LoraLayer):
            # What makes another method of it, as DoRA, is a variant; of embeddings it reads a dict.
            is_plain = not layer.lora_variant and not len(layer.lora_embedding_A)
        if isinstance(layer, BaseTunerLayer) and not is_plain:
            read.update(layer.parameters())
    if read:
        read.update(p for p in model.parameters() if p.requires_grad)
    found: list[nn.Module] = []
    known = -1
    # A module whose hooks are taken away must have all that it holds.
    while known < len(read):
        known = len(read)
        found = []
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if not read.isdisjoint(own):
                found.append(module)
                read.update(own)
    return found


def _hooks_around(
    modules: Iterable[nn.Module], offload: DeepSpeedZeRoOffload
) -> list[RemovableHandle]:
    """The handles of ZeRO-3's hooks around some modules."""
    # Only its handle can remove a hook, and of its module a handle knows nothing but these.
    of_modules = set()
    for module in modules:
        of_modules |= {id(module._forward_hooks), id(module._forward_pre_hooks)}
    handles = []
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in of_modules:
            handles.append(handle)
    return handles


@contextmanager
def _taken_away(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Take hooks away within the block, and put them back in their places after it."""
    before: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
    try:
        for handle in handles:
            hooks = handle.hooks_dict_ref()
            # `_unhook` has removed some for good.
            if hooks is not None and handle.id in hooks:
                before.setdefault(id(hooks), (hooks, dict(hooks)))
                del hooks[handle.id]
        yield
    finally:
        for hooks, all_of_them in before.values():
            hooks.clear()
            hooks.update(all_of_them)


def _unmarked(_part: str) -> None:
    return


def whole_numel(parameter: torch.Tensor) -> int:
    """The number of elements of a parameter before partitioning."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _local_run(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's elements of a parameter, flat, and where they begin in the whole.

    Elements that only fill up the last slice are left out.
    """
    local = getattr(parameter, "ds_tensor", None)
    if local is None:
        return parameter.detach().reshape(-1), 0
    start = dist.get_rank() * local.numel()
    return local.detach().reshape(-1)[: max(0, whole_numel(parameter) - start)], start


def _groups(model: nn.Module, factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """The parameters that train, in one group for each factor of their learning rate."""
    by_factor: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_factor.setdefault(factors.get(name, 1.0), []).append(parameter)
    return [{"params": parameters, "factor": factor} for factor, parameters in by_factor.items()]


def _adamw(
    groups: list[dict[str, Any]], training: TrainingConfig, *, offloaded: bool
) -> torch.optim.Optimizer:
    """Make AdamW: torch's fused one, or DeepSpeed's for the CPU.

    The fused one takes one pass over each tensor. DeepSpeed's, which is vectorised, serves an
    optimizer whose state lies on the CPU beside a GPU.
    """
    options: dict[str, Any] = {
        # every step sets its own
        "lr": 1.0,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_eps,
        "weight_decay": training.weight_decay,
    }
    if offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def _clear_caches(cls: type) -> None:
    """Empty every `lru_cache` of a class, even one hidden in a decorator's closure."""
    for function in vars(cls).values():
        candidates = [function]
        for cell in getattr(function, "__closure__", None) or ():
            candidates.append(cell.cell_contents)
        for candidate in candidates:
            if hasattr(candidate, "cache_clear"):
                candidate.cache_clear()
