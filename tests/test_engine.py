"""What the engine promises beyond training: resets and resumes bit for bit, refuses what is not whole, leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from suite.config.training import TrainingConfig
from suite.errors import IncompatibleError
from suite.record.folder import MARKER
from suite.train.checkpoint import Checkpoints
from suite.train.engine import Engine
from suite.train.engine_config import engine_config, micro_batching
from suite.train.fingerprint import frozen_fingerprint
from suite.train.pieces import adam_of, steps_of
from suite.train.process_group import (
    close_process_group,
    free_port,
    gather_objects,
    init_process_group,
)
from suite.train.shards import shard_name
from tests.ranks import on_ranks
from tests.test_parity import batch_of, model_of

TRAINING = TrainingConfig(batch_size=8)
Found = dict[str, list[Any]]


def steps(engine: Engine, rank: int, which: range, learning_rate: float = 1e-2) -> list[float]:
    engine.module.train()
    losses = []
    for step in which:
        mine = {name: tensor[rank::2] for name, tensor in batch_of("bert", step).items()}
        losses.append(float(engine.step([(mine, 1.0)], learning_rate)))
    return losses


def reset_and_resume(rank: int, stage: int, folder: Path) -> dict[str, Any]:
    engine = Engine(
        model_of("lora", "bert"),
        TRAINING.model_copy(update={"zero_stage": stage}),
        world_size=2,
        device="cpu",
    )
    engine.save(folder / "step-0", alone=True)
    frozen = engine.fingerprint(trained=False)
    start = engine.fingerprint(trained=True)
    first = steps(engine, rank, range(3))
    engine.save(folder / "step-3")
    torch.distributed.barrier()
    rest = steps(engine, rank, range(3, 6))
    end = engine.fingerprint(trained=True)
    state = engine.trained_state()
    engine.load(folder / "step-0", alone=True)
    found = {
        "reset": engine.fingerprint(trained=True) == start,
        "again": steps(engine, rank, range(3)) == first,
    }
    steps(engine, rank, range(10, 12), learning_rate=0.5)
    engine.load(folder / "step-3")
    found |= {
        "resumed": steps(engine, rank, range(3, 6)) == rest,
        "end": engine.fingerprint(trained=True) == end,
    }
    engine.load(folder / "step-0", alone=True)
    engine.load_trained(state)
    whole = frozen_fingerprint(model_of("lora", "bert"))
    found |= {
        "frozen of a whole model": whole == frozen,
        "best": engine.fingerprint(trained=True) == end,
        "frozen": engine.fingerprint(trained=False) == frozen,
        "moved": start != end,
    }
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_reset_resume_and_best_weights_are_bit_exact(stage: int, found: Found) -> None:
    for on_rank in found[f"stage {stage}"]:
        assert on_rank == dict.fromkeys(on_rank, True)


def checkpoint_files_hold_no_frozen_weights(rank: int, folder: Path) -> list[str]:
    engine = Engine(model_of("lora", "bert"), TRAINING, world_size=2, device="cpu")
    Checkpoints(folder).save(engine, 1, {})
    with safe_open(folder / "epoch-1" / shard_name(rank), framework="pt") as file:
        saved = {key.partition("/")[2] for key in file.keys()}  # noqa: SIM118
    assert saved & set(engine.trained_names)
    return sorted(saved - set(engine.trained_names))


def test_frozen_weights_are_not_written(found: Found) -> None:
    assert found["files"] == [[], []]


def damaged_generations(rank: int, folder: Path) -> list[Any]:
    engine = Engine(model_of("lora", "bert"), TRAINING, world_size=2, device="cpu")
    checkpoints = Checkpoints(folder)
    for epoch in (1, 2, 3):
        checkpoints.save(engine, epoch, {"epoch": epoch})
    torch.distributed.barrier()  # rank 0 removes the oldest
    found: list[Any] = [sorted(p.name for p in folder.glob("epoch-*")), checkpoints.load(engine)]
    for damage in (_truncate_shard, _delete_marker):
        torch.distributed.barrier()
        if rank == 0:
            damage(folder)
        torch.distributed.barrier()
        found.append(checkpoints.load(engine))
    return found


def _truncate_shard(folder: Path) -> None:
    shard = next((folder / "epoch-3").glob("shard-1*"))
    shard.write_bytes(shard.read_bytes()[:-100])


def _delete_marker(folder: Path) -> None:
    (folder / "epoch-2" / MARKER).unlink()


def test_a_damaged_checkpoint_falls_back_a_generation_and_then_to_the_start(found: Found) -> None:
    for on_rank in found["damage"]:
        assert on_rank == [["epoch-2", "epoch-3"], {"epoch": 3}, {"epoch": 2}, None]


def six_arms(rank: int) -> tuple[int, list[int]]:
    import psutil

    from suite.meters import release_memory

    alive = 0
    sizes = []
    for method in ("full", "lora", "adapter", "bitfit", "prompt", "read"):
        engine = Engine(model_of(method, "bert"), TRAINING, world_size=2, device="cpu")
        steps(engine, rank, range(2))
        model = weakref.ref(engine.module)
        engine.release()
        del engine
        gc.collect()
        alive += model() is not None
        release_memory()
        sizes.append(psutil.Process().memory_info().rss)
    return alive, sizes


def test_six_arms_in_one_group_leave_its_memory_flat(found: Found) -> None:
    for alive, sizes in found["six arms"]:
        assert alive == 0
        # 8 MiB: code that the first use of a method imports; one leaked tiny engine would hold its model alive above
        assert sizes[-1] - sizes[1] < 8 * 2**20, sizes


def unfreeze_later(rank: int) -> str:
    engine = Engine(
        model_of("lora", "bert"),
        TRAINING.model_copy(update={"frozen_weights": "partitioned"}),
        world_size=2,
        device="cpu",
    )
    engine.check_mask()
    next(p for p in engine.module.parameters() if not p.requires_grad).requires_grad_(True)
    try:
        engine.check_mask()
    except AssertionError as error:
        return str(error)
    return ""


def test_what_is_unfrozen_after_the_start_is_noticed(found: Found) -> None:
    assert all("requires_grad changed" in text for text in found["unfreeze"])


def hooked_modules(rank: int) -> list[tuple[str, bool]]:
    """The modules around which ZeRO-3 has hooks, and whether each holds a parameter."""
    engine = Engine(model_of("lora", "bert"), TRAINING, world_size=2, device="cpu")
    found = []
    for name, module in engine.module.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            found.append((name, next(module.parameters(recurse=False), None) is not None))
    engine.release()
    return found


def test_zero_3_has_hooks_only_around_what_it_gathers(found: Found) -> None:
    for modules in found["hooks"]:
        assert len(modules) > 8
        assert [name for name, holds in modules if not holds] == [""], "the whole model alone"


def rates_of_lanes() -> list[list[float]]:
    """The rates of the parameters of two lanes, where one parameter has a factor."""
    model = model_of("read", "bert")
    name = next(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    engine = Engine(model, TRAINING, world_size=2, device="cpu", lanes=True, factors={name: 16.0})
    lanes = [engine, engine.beside()]
    found = []
    for lane in lanes:
        lane.set_learning_rate(1.0)
        found.append(sorted(group["lr"] for group in lane._engine.optimizer.param_groups))
    for lane in lanes:
        lane.release()
    assert not engine.has_lanes, "it keeps the tensors from which lanes are made"
    return found


def test_a_parameter_has_its_factor_in_every_lane(found: Found) -> None:
    for rates in found["lanes"]:
        assert rates == [[1.0, 16.0], [1.0, 16.0]]


def everything(rank: int, folder: Path) -> dict[str, Any]:
    """All of the above in one pair of processes: starting them costs more than what they do."""
    return {
        "six arms": six_arms(rank),
        "stage 0": reset_and_resume(rank, 0, folder / "0"),
        "stage 3": reset_and_resume(rank, 3, folder / "3"),
        "files": checkpoint_files_hold_no_frozen_weights(rank, folder / "files"),
        "damage": damaged_generations(rank, folder / "damage"),
        "unfreeze": unfreeze_later(rank),
        "hooks": hooked_modules(rank),
        "lanes": rates_of_lanes(),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    first, second = on_ranks(everything, tmp_path_factory.mktemp("engine"))
    return {name: [first[name], second[name]] for name in first}


def test_a_process_may_leave_its_group_and_join_another() -> None:
    for _ in range(2):
        place: dict[str, Any] = {
            "rank": 0,
            "world_size": 1,
            "local_rank": 0,
            "address": "127.0.0.1",
            "port": free_port(),
        }
        init_process_group(**place, device="cpu", timeout_s=60.0)
        try:
            engine = Engine(model_of("bitfit", "bert"), TRAINING, world_size=1, device="cpu")
            assert engine.numel() > 0
            engine.release()
            # DeepSpeed's optimizer for this pair takes a step when it is built.
            training = TRAINING.model_copy(
                update={"zero_stage": 0, "precision": "bf16", "weight_decay": 0.5}
            )
            engine = Engine(model_of("bitfit", "bert"), training, world_size=1, device="cpu")
            optimizer = engine._engine.optimizer
            assert steps_of(adam_of(optimizer)) == 0
            for low, high in zip(optimizer.fp16_groups[0], optimizer.fp32_groups[0], strict=True):
                assert torch.equal(low.float(), high)
            engine.release()
        finally:
            close_process_group()


def group_threads_after_leaving(_rank: int) -> tuple[int, int]:
    """Gloo's threads of this process in its group, and once it has left."""
    gather_objects("something to send")
    inside = gloo_threads()
    close_process_group()
    return inside, gloo_threads()


def gloo_threads() -> int:
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def test_who_has_left_a_group_holds_nothing_of_it() -> None:
    """A thread of the group that is still there when the interpreter ends aborts the process, now and then."""
    for inside, left in on_ranks(group_threads_after_leaving):
        assert inside > 0 and left == 0


def test_every_setting_that_changes_numbers_is_written_out() -> None:
    config = engine_config(TRAINING, world_size=2, device="cpu")
    assert config["gradient_clipping"] == 1.0
    assert (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2
        == config["train_batch_size"]
        == 8
    )
    assert config["zero_optimization"]["stage3_param_persistence_threshold"] == 0


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(
        IncompatibleError, match=r"multiple of 3 \(3 workers\); set training.batch_size=9"
    ):
        micro_batching(TRAINING, 3)
    with pytest.raises(
        IncompatibleError, match=r"multiple of 8 \(2 workers x micro_batch_size 4\)"
    ):
        micro_batching(TrainingConfig(batch_size=12, micro_batch_size=4), 2)
