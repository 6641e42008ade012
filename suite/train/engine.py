"""The DeepSpeed ZeRO engine: the only module that imports deepspeed.

It hides what ZeRO changes about a model (partitioned parameters, collective access, engines that are never freed) behind
whole tensors by name. Every method marked *collective* must be called on all ranks.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from suite.config.training import TrainingConfig
from suite.errors import CheckpointError, IncompatibleError
from suite.train.fingerprint import place_sum, together
from suite.train.pieces import (
    adam_of,
    held_bytes,
    masters_of,
    pieces_of,
    publish,
    set_steps,
    steps_of,
)
from suite.train.shards import Shards, shard_name, write_shard

LocalBatch = tuple[Mapping[str, torch.Tensor], float]


def init_process_group(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    address: str,
    port: int,
    device: str,
    timeout_s: float,
) -> None:
    """Join the group's own rendezvous; every later collective has the deadline `timeout_s`."""
    import deepspeed  # noqa: F401  before there is a group: it takes the one it finds for a default argument, which is then never freed

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    backend, timeout = "nccl" if device == "cuda" else "gloo", timedelta(seconds=timeout_s)
    store = _rendezvous(address, port, rank=rank, world_size=world_size, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    adopt_process_group(backend, timeout_s=timeout_s)


def _rendezvous(address: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Where the ranks find each other. Rank 0 listens at the group's own address; by itself torch would at every one of the machine."""
    untyped: Any = dist
    listening: int | None = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server(
            (address, port), family=family, backlog=world_size + 8
        ).detach()
    return untyped.TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening
    )


def adopt_process_group(backend: str, *, timeout_s: float) -> None:
    """Let DeepSpeed use the process group that this process has joined.

    DeepSpeed's shared-memory all-reduce for CPUs is left out: it wants a compiler at run time, waits without a deadline and
    leaves 66 MiB of /dev/shm behind when a rank is killed; training's collectives go through gloo in any case.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # torch 2.13 renamed collectives that DeepSpeed 0.19.8 still calls by their old names, thousands of times an epoch
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout_s),
    )


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def close_process_group() -> None:
    """Leave the group without waiting for anyone; without this a process may abort at exit after success.

    By DeepSpeed's own call: otherwise it keeps handles of the group, and the next trainer of this process would get these.
    """
    if dist.is_initialized():
        import deepspeed

        deepspeed.comm.destroy_process_group()


def all_agree(ok: bool) -> bool:
    """True on every rank if `ok` is True on every rank. Collective."""
    flag = torch.tensor(int(ok), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def lowest(*values: float) -> list[float]:
    """The lowest of each value over the ranks, in single precision. Collective."""
    found = torch.tensor(
        values, dtype=torch.float32, device="cuda" if dist.get_backend() == "nccl" else "cpu"
    )
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    lows: list[float] = found.tolist()
    return lows


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def engine_config(training: TrainingConfig, *, world_size: int, device: str) -> dict[str, Any]:
    """DeepSpeed's configuration with everything that changes numbers or memory written out.

    Left out, DeepSpeed 0.19.8 would clip at 1.0 and reserve buckets made for models a thousand times larger.
    """
    micro, accumulation = micro_batching(training, world_size)
    zero: dict[str, Any] = {
        "stage": training.zero_stage,
        "reduce_bucket_size": training.reduce_bucket_elements,
        "allgather_bucket_size": training.reduce_bucket_elements,
        "overlap_comm": device == "cuda",
        "contiguous_gradients": device == "cuda",
    }
    if training.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": training.reduce_bucket_elements,
            "stage3_param_persistence_threshold": training.persistence_threshold_elements,
        }
    if device == "cuda" and training.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if training.offload == "all":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_batch_size": training.batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": training.gradient_clipping,
        "bf16": {"enabled": uses_bf16(training, device)},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def uses_bf16(training: TrainingConfig, device: str) -> bool:
    return training.precision == "bf16" or (training.precision == "auto" and device == "cuda")


def micro_batching(training: TrainingConfig, world_size: int) -> tuple[int, int]:
    """Examples per forward pass and forward passes per step on each rank.

    Raises:
        IncompatibleError: The batch cannot be cut into equal parts.
    """
    if training.batch_size % world_size:
        raise IncompatibleError(
            f"training.batch_size {training.batch_size} is not divisible by {world_size} workers; "
            f"use {training.batch_size // world_size * world_size or world_size} or another number of workers"
        )
    share = training.batch_size // world_size
    micro = training.micro_batch_size or share
    if share % micro:
        raise IncompatibleError(
            f"training.micro_batch_size {micro} does not divide a worker's share of the batch, {share} "
            f"(batch_size {training.batch_size} / {world_size} workers)"
        )
    return micro, share // micro


class Engine:
    """One model under ZeRO, reusable for trial after trial of the same arm.

    Args:
        model: A whole model on the CPU with its `requires_grad` mask final; partitioned in place, never used again elsewhere.
        training: Batch, clipping, precision and ZeRO settings.
        world_size: Ranks of the initialised process group.
        device: "cuda" or "cpu".
    """

    def __init__(
        self, model: nn.Module, training: TrainingConfig, *, world_size: int, device: str
    ) -> None:
        import deepspeed

        self.training, self.world_size, self.device = training, world_size, device
        self.config = engine_config(training, world_size=world_size, device=device)
        self.trained_names = [name for name, p in model.named_parameters() if p.requires_grad]
        trained = [p for p in model.parameters() if p.requires_grad]
        betas = (training.adam_beta1, training.adam_beta2)
        optimizer = _adamw(
            trained, training, betas, offloaded=device == "cuda" and training.offload != "none"
        )
        # before ZeRO copies the parameters: its flat buffers take their dtype from them
        model.to(torch.bfloat16 if uses_bf16(training, device) else torch.float32)
        self._linear = torch.nn.functional.linear
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.config, dist_init_required=False
        )
        self._frozen: str | None = None
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
        """One optimizer step over this rank's micro-batches. Collective.

        Args:
            batches: Model inputs with their weight: the loss of the step is the mean of weight x loss over micro-batches
                and ranks, so that unequal parts (tokens) still give the gradient of the whole batch's mean.
            learning_rate: For this step.
            mark: Called after each part of a micro-batch: forward, backward, update.

        Returns:
            This rank's part of the step's loss, detached, on the device.
        """
        assert self._engine.optimizer is not None
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        total = torch.zeros((), device=self.device)
        mark = mark or _unmarked
        for batch, weight in batches:
            loss = self._engine(**batch).loss * weight
            mark("forward")
            self._engine.backward(loss)
            mark("backward")
            self._engine.step()
            mark("update")
            total += loss.detach().float()
        return total / len(batches)

    def save(self, folder: Path, *, alone: bool = False) -> Path:
        """Write this rank's share of the trained parameters and of the optimizer's state; frozen weights are never written.

        Args:
            alone: Write all that this rank holds, also what others hold as well: it will read this file and no other.

        Returns:
            The file, in `folder`.
        """
        rank, optimizer = dist.get_rank(), self._engine.optimizer
        adam, pieces = adam_of(optimizer), pieces_of(self.module, optimizer, rank=rank)
        if not alone:
            pieces = [
                piece.share(rank, self.world_size) if piece.everywhere else piece
                for piece in pieces
            ]
        path = folder / shard_name(rank)
        buffers = self._buffers() if alone or rank == 0 else {}
        about = {"rank": rank, "world_size": self.world_size, "buffers": buffers}
        write_shard(
            path,
            [piece for piece in pieces if piece.length > 0],
            adam.state,
            steps=steps_of(adam),
            **about,
        )
        return path

    def load(self, folder: Path, *, written_by: int | None = None, alone: bool = False) -> None:
        """Bring back everything that `save` wrote, on as many ranks as it may be now. Collective.

        Args:
            folder: Holds the files of all ranks that wrote.
            written_by: How many these were; None = as many as now.
            alone: Read this rank's own file only, of a group of this size.

        Raises:
            CheckpointError: Not every rank could load; the engine is of no use any more.
        """
        ranks = [dist.get_rank()] if alone else range(written_by or self.world_size)
        cause: BaseException | None = None
        try:
            with Shards([folder / shard_name(rank) for rank in ranks]) as shards:
                if not alone:
                    shards.check(
                        {name: whole_numel(parameter) for name, parameter in self._trained()}
                    )
                self._take(shards)
        except (OSError, RuntimeError, KeyError, ValueError, SafetensorError) as error:
            cause = error
        if not all_agree(cause is None):
            raise CheckpointError(
                f"{folder}: could not be loaded on every rank" + (f": {cause}" if cause else "")
            ) from cause
        publish(self._engine.optimizer)
        self._leave_partitioned(False)

    def _take(self, shards: Shards) -> None:
        self._leave_partitioned(True)
        adam = adam_of(self._engine.optimizer)
        pieces = pieces_of(self.module, self._engine.optimizer, rank=dist.get_rank())
        set_steps(adam, masters_of(self.module, self._engine.optimizer), shards.steps)
        shards.read(pieces, adam.state)
        for name, buffer in self._buffers().items():
            buffer.copy_(shards.buffers[name])

    def _buffers(self) -> dict[str, torch.Tensor]:
        """What the model keeps beside its parameters and stores with them."""
        stored = self.module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in stored}

    def _leave_partitioned(self, begin: bool) -> None:
        """ZeRO-3 keeps some parameters gathered: these are given back before the weights change, and fetched again after."""
        optimizer: Any = self._engine.optimizer
        if self.training.zero_stage == 3:
            optimizer.checkpoint_event_prologue() if begin else optimizer.checkpoint_event_epilogue()

    def trained_state(self) -> dict[str, torch.Tensor]:
        """Trained tensors by name, whole, fp32 on the CPU; empty on other ranks than 0. Collective."""
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self._trained():
            with self._gathered([parameter]):
                if dist.get_rank() == 0:
                    state[name] = parameter.detach().to("cpu", torch.float32, copy=True)
        return state

    def load_trained(self, state: Mapping[str, torch.Tensor]) -> None:
        """Write whole trained tensors into the forward weights (for evaluation, not for further training). Collective.

        Args:
            state: As `trained_state` returns it; only rank 0's is read.
        """
        for name, parameter in self._trained():
            with self._gathered([parameter], modifier_rank=0), torch.no_grad():
                if dist.get_rank() == 0:
                    parameter.copy_(state[name])
                if self.training.zero_stage < 3:
                    dist.broadcast(parameter.data, src=0)

    def digest(self, *, trained: bool) -> str:
        """SHA-256 over the trained or the frozen weights as they lie on the ranks, without gathering them. Collective."""
        sha = hashlib.sha256()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad == trained:
                local = getattr(parameter, "ds_tensor", parameter).detach()
                sha.update(name.encode())
                sha.update(local.to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
        return hashlib.sha256("".join(gather_objects(sha.hexdigest())).encode()).hexdigest()

    def fingerprint(self, *, trained: bool) -> str:
        """Of the trained or the frozen forward weights, the same on any number of ranks (`suite.train.fingerprint`). Collective."""
        chosen = {
            name: p for name, p in self.module.named_parameters() if p.requires_grad == trained
        }
        sums: dict[str, int] = {}
        for name, parameter in chosen.items():
            local, start = _local_run(parameter)
            if len(local) and (start or dist.get_rank() == 0):
                sums[name] = place_sum(local, start)
        return together(gather_objects(sums), {name: whole_numel(p) for name, p in chosen.items()})

    @property
    def frozen_fingerprint(self) -> str:
        """`fingerprint` of the frozen weights, taken once: no training changes them, which the end of every trial checks. Collective."""
        if self._frozen is None:
            self._frozen = self.fingerprint(trained=False)
        return self._frozen

    def numel(self, *, trained_only: bool = False) -> int:
        """Parameters counted whole, each shared one once."""
        return sum(
            whole_numel(p) for p in self.module.parameters() if p.requires_grad or not trained_only
        )

    def held_bytes(self) -> tuple[int, int]:
        """What this rank holds between two steps: forward weights, whole or its share of them; and Adam's moments and fp32 copies."""
        return held_bytes(self.module, self._engine.optimizer)

    def check_mask(self) -> None:
        """`requires_grad` is what it was at the start: what is unfrozen later would never train, silently."""
        now = [name for name, p in self.module.named_parameters() if p.requires_grad]
        if now != self.trained_names:
            changed = sorted(set(now) ^ set(self.trained_names))
            raise AssertionError(f"requires_grad changed after the engine was built: {changed[:5]}")

    def release(self) -> None:
        """Free the engine. `destroy()` alone leaks every ZeRO-3 engine through two of DeepSpeed's globals."""
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partitioned_param_coordinator import (
            PartitionedParameterCoordinator,
        )

        self._engine.destroy()
        torch.nn.functional.linear = (
            self._linear
        )  # ZeRO-3 leaves its own there, for the whole process
        parameter_offload.FWD_MODULE_STACK.clear()
        _clear_caches(PartitionedParameterCoordinator)
        del self._engine
        gc.collect()

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    @contextmanager
    def _gathered(
        self, parameters: Iterable[nn.Parameter], modifier_rank: int | None = None
    ) -> Iterator[None]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=modifier_rank, enabled=self.training.zero_stage == 3
        ):
            yield


def _unmarked(_part: str) -> None:
    return


def whole_numel(parameter: torch.Tensor) -> int:
    """Elements of a parameter before partitioning."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _local_run(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What this rank holds of a parameter, flat and without what fills it up, and where that begins in the whole."""
    local = getattr(parameter, "ds_tensor", None)
    if local is None:
        return parameter.detach().reshape(-1), 0
    start = dist.get_rank() * local.numel()
    return local.detach().reshape(-1)[: max(0, whole_numel(parameter) - start)], start


def _adamw(
    parameters: list[nn.Parameter],
    training: TrainingConfig,
    betas: tuple[float, float],
    *,
    offloaded: bool,
) -> Any:
    """AdamW, fused (one pass over each tensor); with the optimizer on the CPU beside a GPU, DeepSpeed's own vectorised one."""
    options: dict[str, Any] = {
        "lr": 1.0,
        "betas": betas,
        "eps": training.adam_eps,
        "weight_decay": training.weight_decay,
    }
    if offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, adamw_mode=True, **options)
    return torch.optim.AdamW(parameters, fused=True, **options)


def _clear_caches(cls: type) -> None:
    """Empty every `lru_cache` of a class, also one hidden in a decorator's closure."""
    for function in vars(cls).values():
        for candidate in (
            function,
            *(cell.cell_contents for cell in getattr(function, "__closure__", None) or ()),
        ):
            if hasattr(candidate, "cache_clear"):
                candidate.cache_clear()
