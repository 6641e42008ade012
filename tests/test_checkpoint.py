"""Checkpoints: nothing that was cut off, damaged or mixed up is ever trained on, and any number of ranks can go on from a whole one."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist

from suite.config.training import TrainingConfig
from suite.errors import CheckpointError
from suite.record.folder import MARKER
from suite.train.checkpoint import Checkpoints, UnusableError, read_marker, sealed
from suite.train.engine import Engine
from suite.train.fingerprint import place_sum, together
from suite.train.frozen_weights import kept_weights
from suite.train.pieces import adam_of, pieces_of, steps_of
from suite.train.process_group import gather_objects
from suite.train.shards import FORMAT, shard_name
from tests.forked import copy_at_each, fork_group, kill_at
from tests.ranks import in_processes, on_ranks
from tests.test_parity import batch_of, model_of

EPOCHS = (1, 2, 3)
Case = tuple[str, str, int, int]
"""Method, precision, ZeRO stage, persistence threshold in elements."""
CASES: list[Case] = [
    ("lora", "fp32", 3, 0),
    ("full", "bf16", 3, 100_000),
    ("full", "fp32", 0, 0),
    ("lora", "bf16", 2, 0),
]
OTHER_SIZES = (1, 4)
TOLERANCE = 2e-5
"""Losses on another number of ranks: the same rows, added up in another order."""


def make_engine(world_size: int, method: str = "lora", **training: Any) -> Engine:
    return Engine(
        model_of(method, "bert"),
        TrainingConfig(batch_size=8, **training),
        world_size=world_size,
        device="cpu",
    )


def train(engine: Engine, steps: range, *, learning_rate: float = 1e-2) -> list[float]:
    """The losses of whole batches."""
    engine.module.train()
    losses = []
    for step in steps:
        mine = {
            name: tensor[dist.get_rank() :: engine.world_size]
            for name, tensor in batch_of("bert", step).items()
        }
        loss = engine.step([(mine, 1.0)], learning_rate)
        dist.all_reduce(loss)
        losses.append(float(loss) / engine.world_size)
    return losses


# ---- killed at every stage of writing ---------------------------------------------------------------------------------


def save_and_die(
    rank: int, folder: Path, victim: int, operation: int, copies: Path | None = None
) -> None:
    """Two epochs, and a third during which the victim is killed, or copied at every stage."""
    engine = make_engine(dist.get_world_size())
    checkpoints = Checkpoints(folder / "checkpoint")
    for epoch in EPOCHS[:-1]:
        train(engine, range(epoch, epoch + 1))
        checkpoints.save(engine, epoch, {"trained": engine.fingerprint(trained=True)})
    dist.barrier()
    train(engine, range(3, 4))
    state = {"trained": engine.fingerprint(trained=True)}
    if rank != victim:
        checkpoints.save(engine, 3, state)
        return
    if copies is None:
        count = kill_at(operation, folder / "checkpoint")
    else:
        count = copy_at_each(folder / "checkpoint", copies)
    checkpoints.save(engine, 3, state)
    (folder / "operations").write_text(str(count()))


def look_again(rank: int, folders: list[Path]) -> None:
    """What a new group makes of it: the epoch, and whether the weights are those of that epoch."""
    engine = make_engine(dist.get_world_size())
    for folder in folders:
        before = [p.name for p in (folder / "checkpoint").iterdir()]
        state = Checkpoints(folder / "checkpoint").load(engine)
        whole = state is not None and state["trained"] == engine.fingerprint(trained=True)
        epochs = [
            n
            for n in EPOCHS
            if (folder / "checkpoint" / f"epoch-{n}").exists()
            and _marked(folder / "checkpoint" / f"epoch-{n}", state)
        ]
        (folder / f"seen-{rank}.json").write_text(
            json.dumps([epochs[-1:] or [0], whole, sorted(before)])
        )


def _marked(folder: Path, state: Any) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text())["state"] == state)
    except (OSError, ValueError):
        return False


def killed(folder: Path, ranks: int, stage: int) -> Path:
    """A folder whose last rank was killed at a stage of its third epoch."""
    path = folder / f"{ranks}-killed-{stage}"
    path.mkdir()
    codes = fork_group(save_and_die, path, ranks - 1, stage, world_size=ranks, timeout_s=20)
    assert codes[-1] == -9
    return path


def whole(folder: Path, ranks: int, copies: Path | None) -> tuple[Path, int]:
    """A folder in which nobody was killed, and how many stages its last rank went through."""
    path = folder / f"{ranks}-whole"
    path.mkdir()
    arguments = (path, ranks - 1, -1, copies)
    assert fork_group(save_and_die, *arguments, world_size=ranks) == [0] * ranks
    return path, int((path / "operations").read_text())


def seen_again(folders: list[Path], ranks: int) -> list[list[Any]]:
    """By folder, what each rank of a new group makes of it."""
    assert fork_group(look_again, folders, world_size=ranks) == [0] * ranks
    return [
        [json.loads((folder / f"seen-{r}.json").read_text()) for r in range(ranks)]
        for folder in folders
    ]


def left_behind(folder: Path) -> list[tuple[str, int]]:
    """The files of a checkpoint's folder and their sizes; temporary ones have names by chance."""
    files = [path for path in (folder / "checkpoint").rglob("*") if path.is_file()]
    return sorted((path.parent.name, path.stat().st_size) for path in files)


def killed_everywhere(_number: int, folder: Path) -> dict[str, Any]:
    """Forks its ranks, so it wants a process without threads."""
    torch.set_num_threads(1)
    # A rank alone: a copy of its folder at each stage is what a kill there leaves behind. Three kills show it.
    copies = folder / "1-copies"
    alone, stages = whole(folder, 1, copies)
    cut = [copies / str(stage) for stage in range(1, stages + 1)]
    at = (1, (stages + 1) // 2, stages)
    ended = [killed(folder, 1, stage) for stage in at]
    left = [(left_behind(path), left_behind(cut[n - 1])) for n, path in zip(at, ended, strict=True)]
    found: dict[str, Any] = {"1": seen_again([alone, *cut, *ended], 1), "left": left}
    # Of two, the other one finds out by itself; every second stage.
    both, stages = whole(folder, 2, None)
    ended = [killed(folder, 2, stage) for stage in range(1, stages + 1, 2)]
    found["2"] = seen_again([both, *ended], 2)
    return found


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = in_processes(killed_everywhere, tmp_path_factory.mktemp("killed"))
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_whenever_the_writer_is_killed_the_last_committed_epoch_is_loaded_on_every_rank(
    cut_off: dict[str, Any], ranks: int
) -> None:
    uncut, *cut = cut_off[str(ranks)]
    if ranks == 1:
        # The last three were killed where the first, the middle and the last copy were taken.
        *cut, first, middle, last = cut
        assert [first, middle, last] == [cut[0], cut[(len(cut) - 1) // 2], cut[-1]]
    assert [seen[:2] for seen in uncut] == [[[3], True]] * ranks
    assert len(cut) >= (5 if ranks == 1 else 3)
    loaded = []
    for seen in cut:
        (epoch,), as_saved, _ = seen[0]
        assert as_saved and seen == [seen[0]] * ranks
        loaded.append(epoch)
    assert set(loaded) == ({2, 3} if ranks == 1 else {2, 3} & set(loaded)) and loaded == sorted(
        loaded
    ), "never back again once committed"


@pytest.mark.slow
def test_a_kill_leaves_what_was_there_just_before(cut_off: dict[str, Any]) -> None:
    for killed_there, copied_there in cut_off["left"]:
        assert killed_there == copied_there


# ---- damaged afterwards -----------------------------------------------------------------------------------------------

Damage = Callable[[Path], None]


def _flip(name: str, at: float) -> Damage:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(at * (len(data) - 1))] ^= 0x10
        (folder / name).write_bytes(data)

    return damage


def _cut(name: str, part: float) -> Damage:
    return lambda folder: (
        (folder / name).write_bytes(
            (folder / name).read_bytes()[: int(part * (folder / name).stat().st_size)]
        )
        and None
    )


def _link(name: str) -> Damage:
    def damage(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / f"elsewhere-{name}")
        (folder / name).symlink_to(folder.parent / f"elsewhere-{name}")

    return damage


def _older_marker(folder: Path) -> None:
    shutil.copy(folder.parent / "epoch-2" / MARKER, folder / MARKER)


def _older_shard(folder: Path) -> None:
    shutil.copy(folder.parent / "epoch-2" / shard_name(0), folder / shard_name(0))


def _edited(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        (folder / MARKER).write_text(
            json.dumps(json.loads((folder / MARKER).read_text()) | changes)
        )

    return damage


def _leads_out(folder: Path) -> None:
    marker = json.loads((folder / MARKER).read_text())
    del marker["seal"]
    marker["files"] = {f"../epoch-2/{name}": about for name, about in marker["files"].items()}
    (folder / MARKER).write_text(json.dumps(sealed(marker)))


def _leftovers(folder: Path) -> None:
    (folder / f".{shard_name(0)}.abc").write_bytes(b"half a fi")
    (folder / "global_step1").mkdir()
    (folder.parent / "epoch-4").mkdir()
    (folder.parent / "epoch-x").mkdir()


SHARDS = (shard_name(0), shard_name(1))


def _of_another_precision(folder: Path) -> None:
    """As a host would have written it on which `auto` is bf16."""
    marker = json.loads((folder / MARKER).read_text())
    marker.pop("seal")
    (folder / MARKER).write_text(json.dumps(sealed({**marker, "precision": "bf16"})))


DAMAGES: dict[str, Damage] = {
    **{
        f"{name} missing": lambda folder, name=name: (folder / name).unlink()
        for name in (*SHARDS, MARKER)
    },  # type: ignore[misc]
    **{
        f"{name} cut to {part}": _cut(name, part)
        for name in (*SHARDS, MARKER)
        for part in (0.0, 0.5, 0.99)
    },
    **{f"{name} flipped at {at}": _flip(name, at) for name in SHARDS for at in (0.0, 0.5, 1.0)},
    **{f"{MARKER} flipped at {at}": _flip(MARKER, at) for at in (0.1, 0.3, 0.5, 0.7, 0.9)},
    **{f"{name} a link": _link(name) for name in SHARDS},
    "an older marker": _older_marker,
    "an older shard": _older_shard,
    "another state": _edited(state={"epoch": 7}),
    "another number of ranks": _edited(world_size=1),
    "another format": _edited(format="of tomorrow"),
    "another precision": _of_another_precision,
    "files elsewhere": _leads_out,
}


def load_damaged(rank: int, folder: Path) -> dict[str, Any]:
    engine = make_engine(2)
    whole = Checkpoints(folder / "whole")
    fingerprints = {}
    for epoch in EPOCHS:
        train(engine, range(epoch, epoch + 1))
        whole.save(engine, epoch, {"epoch": epoch})
        fingerprints[epoch] = engine.fingerprint(trained=True)
    found: dict[str, Any] = {}
    for name, damage in {**DAMAGES, "leftovers": _leftovers}.items():
        path = folder / "damaged"
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(whole.folder, path)
            damage(path / "epoch-3")
        dist.barrier()
        state = Checkpoints(path).load(engine)
        found[name] = [
            state,
            state is not None and engine.fingerprint(trained=True) == fingerprints[state["epoch"]],
        ]
    found["poisoned"] = _load_poisoned(engine, whole)
    found["renamed"] = _load_renamed(rank, engine, folder)
    return found


def _load_poisoned(engine: Engine, checkpoints: Checkpoints) -> str:
    """One element of one frozen tensor, on one rank."""
    frozen = next(w for w in kept_weights(engine.module, engine.kept_names).values() if len(w) > 8)
    if dist.get_rank() == 1:
        frozen[3] += 1e-3
    try:
        checkpoints.load(engine)
    except CheckpointError as error:
        return str(error)
    finally:
        if dist.get_rank() == 1:
            frozen[3] -= 1e-3
    return ""


def _load_renamed(rank: int, engine: Engine, folder: Path) -> str:
    path = engine.save(folder / "renamed")
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    name = next(iter(json.loads(metadata["runs"])))
    metadata["runs"] = metadata["runs"].replace(name, f"{name}x")
    save_file(
        {key.replace(name, f"{name}x"): tensor for key, tensor in tensors.items()}, path, metadata
    )
    dist.barrier()
    try:
        engine.load(folder / "renamed")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(load_damaged, tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_generation_is_passed_over_by_every_rank(
    damaged: list[dict[str, Any]], name: str
) -> None:
    assert [found[name] for found in damaged] == [[{"epoch": 2}, True]] * 2


def test_leftovers_beside_a_whole_generation_change_nothing(damaged: list[dict[str, Any]]) -> None:
    assert [found["leftovers"] for found in damaged] == [[{"epoch": 3}, True]] * 2


def test_other_frozen_weights_than_the_trial_began_with_are_refused(
    damaged: list[dict[str, Any]],
) -> None:
    assert all("frozen weights are not those" in found["poisoned"] for found in damaged)


def test_a_trained_parameter_under_another_name_is_refused(damaged: list[dict[str, Any]]) -> None:
    assert all("other parameters than those that train" in found["renamed"] for found in damaged)


def test_what_is_passed_over_is_said(tmp_path: Path) -> None:
    (tmp_path / "epoch-1").mkdir()
    with pytest.raises(UnusableError, match="never committed"):
        read_marker(tmp_path / "epoch-1", 1)
    for text in ("{", "[" * 200_000):
        (tmp_path / "epoch-1" / MARKER).write_text(text)
        with pytest.raises(UnusableError, match="cannot be read"):
            read_marker(tmp_path / "epoch-1", 1)
    (tmp_path / "epoch-1" / MARKER).write_text(f'{{"format": "{FORMAT}", "loss": NaN}}')
    with pytest.raises(UnusableError, match="was changed"):
        read_marker(tmp_path / "epoch-1", 1)


# ---- another number of ranks ------------------------------------------------------------------------------------------


def whole_state(engine: Engine) -> tuple[dict[str, list[torch.Tensor]], int]:
    """fp32 weights and both moments of every trained parameter, whole, put together from the pieces of all ranks."""
    optimizer = engine._engine.optimizer
    adam = adam_of(optimizer)
    mine = []
    for piece in pieces_of(engine.module, optimizer, rank=dist.get_rank()):
        held = (piece.master, *(adam.state[piece.master][key] for key in ("exp_avg", "exp_avg_sq")))
        mine.append((piece.name, piece.start, [piece.of(tensor).clone() for tensor in held]))
    runs: dict[str, dict[int, list[torch.Tensor]]] = {}
    for name, start, tensors in (run for part in gather_objects(mine) for run in part):
        runs.setdefault(name, {})[start] = tensors
    whole = {
        name: [torch.cat([found[s][i] for s in sorted(found)]) for i in range(3)]
        for name, found in runs.items()
    }
    return whole, steps_of(adam)


def elastic(rank: int, folder: Path, save: bool) -> list[Any]:
    found = []
    for method, precision, stage, threshold in CASES:
        settings = {
            "precision": precision,
            "zero_stage": stage,
            "persistence_threshold_elements": threshold,
        }
        engine = make_engine(dist.get_world_size(), method, **settings)
        checkpoints = Checkpoints(folder / f"{method}-{precision}-{stage}")
        if save:
            train(engine, range(3))
            checkpoints.save(engine, 1, {"epoch": 1})
        else:
            assert checkpoints.load(engine) == {"epoch": 1}
        prints = [engine.fingerprint(trained=trained) for trained in (True, False)]
        found.append((*whole_state(engine), prints, train(engine, range(3, 6))))
        engine.release()
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """Saved by two ranks: what these had, and what others make of it; by number of ranks."""
    folder = tmp_path_factory.mktemp("elastic")
    found = {2: on_ranks(elastic, folder, True)[0]}
    return found | {
        size: on_ranks(elastic, folder, False, world_size=size)[0] for size in OTHER_SIZES
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", OTHER_SIZES)
@pytest.mark.parametrize("case", CASES)
def test_another_number_of_ranks_goes_on_from_the_same_numbers(
    resumed: dict[int, list[Any]], size: int, case: Case
) -> None:
    state, steps, prints, losses = resumed[2][CASES.index(case)]
    other_state, other_steps, other_prints, other_losses = resumed[size][CASES.index(case)]
    assert (steps, prints) == (other_steps, other_prints) and state.keys() == other_state.keys()
    for name, tensors in state.items():
        for tensor, other in zip(tensors, other_state[name], strict=True):
            assert torch.equal(tensor, other), name
    assert other_losses == pytest.approx(
        losses, abs=TOLERANCE if case[1] == "fp32" else 2e-2
    )  # bf16 has 8 bits of mantissa


# ---- the fingerprint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_does_not_depend_on_how_a_tensor_is_cut(dtype: torch.dtype) -> None:
    values = torch.randn(200_003, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = together([{"w": place_sum(values, 0)}], {"w": len(values)})
    for cuts in ((100_001,), (1, 65_536, 65_537, 131_072), (200_002,)):
        edges = [0, *cuts, len(values)]
        parts = [{"w": place_sum(values[a:b], a)} for a, b in itertools.pairwise(edges)]
        assert together(parts, {"w": len(values)}) == whole


def test_a_fingerprint_sees_every_change() -> None:
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    before = place_sum(values, 0)
    for place in (0, 1, 65_535, 65_536, 69_999):
        changed = values.clone()
        changed[place] = torch.nextafter(changed[place], torch.tensor(9.0))
        assert place_sum(changed, 0) != before
    swapped = values.clone()
    swapped[[3, 65_540]] = values[[65_540, 3]]
    assert place_sum(swapped, 0) != before
