"""An epoch that is left because notice was given goes on as if nothing had happened."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from suite.record.attempts import PreemptedError
from suite.record.folder import Home
from suite.record.result import TrialResult
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train import midway
from suite.train.epoch import EpochStart
from suite.train.loop import Trainer
from suite.train.midway import Pace, set_streams, streams
from tests.forked import fork_group
from tests.ranks import in_processes
from tests.test_loop import TRAINING, curve, make_spec
from tests.tiny import tiny_choice

STEPS = 6
EPOCHS = 2
Left = tuple[int, int, int]
"""How many ranks there are, which of them is told to leave, and after how many steps of the trial."""
CASES: dict[str, Left] = {
    "in the first half of an epoch": (1, 0, 2),
    "in the second half": (1, 0, 5),
    "of two ranks, one": (2, 1, 8),
    "at the border of two epochs": (1, 0, 6),
}


def spec_of(ranks: int, *, dropout: float = 0.1) -> TrialSpec:
    training = TRAINING.model_copy(update={"epochs": EPOCHS, "epoch_steps": STEPS, "zero_stage": 3})
    spec = make_spec(training=training, world_size=ranks)
    return spec.model_copy(
        update={
            "arm": spec.arm.model_copy(update={"backbone": tiny_choice("bert", dropout=dropout)})
        }
    )


def trial(
    rank: int, port: int, folder: Path, spec: TrialSpec, ranks: int, leave: Left | None
) -> None:
    """Run or go on with a trial; one that leaves notes how far it was."""
    midway.MOST_STEPS = 1  # a vote at every step, so that a test may say when
    trainer = Trainer(
        Workspace(Home(folder)), rank=rank, world_size=ranks, local_rank=rank, master_port=port
    )
    trainer.start(spec)
    if leave is not None and rank == leave[1]:
        _leave_after(trainer, leave[2])
    try:
        while not trainer.epoch().done:
            pass
        trainer.finish()
    except PreemptedError as error:
        (folder / f"left-{rank}").write_text(str(error))


def _leave_after(trainer: Trainer, steps: int) -> None:
    engine = next(iter(trainer._runs.values())).warm.engine
    count = 0
    step = engine.micro_step

    def counted(*args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        loss = step(*args)
        if count == steps:
            trainer.leave()
        return loss

    engine.micro_step = counted  # type: ignore[method-assign]


def everything(_number: int, folder: Path) -> dict[str, Any]:
    """Forks its ranks, so it wants a process without threads."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for ranks in (1, 2):
        assert (
            fork_group(
                trial,
                folder / f"whole-{ranks}",
                spec_of(ranks),
                ranks,
                None,
                world_size=ranks,
                join=False,
            )
            == [0] * ranks
        )
        found[f"whole {ranks}"] = read(folder / f"whole-{ranks}", spec_of(ranks))
    for name, left in CASES.items():
        ranks = left[0]
        home = folder / name.replace(" ", "-")
        spec = spec_of(left[0])
        assert (
            fork_group(trial, home, spec, ranks, left, world_size=ranks, join=False) == [0] * ranks
        )
        said = [(home / f"left-{rank}").read_text() for rank in range(ranks)]
        kept = sorted(p.name for p in Home(home).trial(spec).checkpoint.iterdir())
        assert (
            fork_group(trial, home, spec, ranks, None, world_size=ranks, join=False) == [0] * ranks
        )
        found[name] = [ranks, said, kept, read(home, spec)]
    plain = spec_of(2, dropout=0.0)
    assert fork_group(trial, folder / "plain", plain, 2, None, world_size=2, join=False) == [0, 0]
    assert fork_group(trial, folder / "shrunk", plain, 2, (2, 0, 3), world_size=2, join=False) == [
        0,
        0,
    ]
    assert fork_group(trial, folder / "shrunk", plain, 1, None, join=False) == [0]
    found["another number of ranks"] = [
        read(folder / "plain", plain),
        read(folder / "shrunk", plain),
    ]
    return found


def read(home: Path, spec: TrialSpec) -> dict[str, Any]:
    result = Home(home).trial(spec).result()
    assert (
        isinstance(result, TrialResult)
        and result.validity is not None
        and result.timing is not None
    )
    first = result.validity.loss_first
    sizes = result.provenance.get("world_sizes")
    return {
        "curve": curve(result),
        "first": first,
        "end": result.validity.output_end_sha256,
        "frozen": result.frozen_sha256,
        "sizes": sizes,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = in_processes(everything, tmp_path_factory.mktemp("midway"))
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_epoch_that_was_left_goes_on_bit_for_bit(found: dict[str, Any], name: str) -> None:
    ranks, said, kept, resumed = found[name]
    whole = found[f"whole {ranks}"]
    assert {key: resumed[key] for key in ("curve", "first", "end", "frozen")} == {
        k: whole[k] for k in ("curve", "first", "end", "frozen")
    }
    steps = CASES[name][2]
    epoch, step = divmod(steps, STEPS)
    assert said == [said[0]] * ranks, "all ranks leave at the same step"
    assert f"after step {step} of {STEPS} of epoch {epoch + 1}" in said[0]
    assert kept == [f"epoch-{n}" for n in range(1, epoch + 1 + (step > 0))], (
        "no more steps are lost than the one under way"
    )


@pytest.mark.slow
def test_on_another_number_of_ranks_the_rows_are_the_same(found: dict[str, Any]) -> None:
    whole, shrunk = found["another number of ranks"]
    assert shrunk["sizes"] == [2, 1]
    losses = [[loss for loss, _ in run["curve"]] for run in (whole, shrunk)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)  # sums of the same rows in another order
    assert losses[1] != losses[0] or whole["end"] != shrunk["end"]


def test_random_streams_are_brought_back() -> None:
    import random

    import numpy as np

    state = json.loads(json.dumps(streams()))
    drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
    set_streams(state)
    assert [random.random(), float(np.random.random()), float(torch.rand(()))] == drawn


def test_ranks_ask_each_other_every_few_seconds_and_at_least_every_few_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("suite.train.midway.time.perf_counter", lambda: now)
    monkeypatch.setattr("suite.train.midway.lowest", lambda *values: list(values))
    for step_s, expected in ((0.001, 10), (0.5, 4), (30.0, 1)):
        now = 0.0
        pace = Pace(0)
        asked = []
        for step in range(40):
            if pace.is_due(step):
                asked.append(step)
                assert pace.vote(step, finite=[True], stay=step < 20) == ([True], step < 20)
            now += step_s
        gaps = [b - a for a, b in itertools.pairwise(asked[2:])]
        assert set(gaps) == {expected} and asked[0] == 0


@pytest.mark.parametrize(
    ("before", "after", "epoch"),
    [
        ((0.0, None), (2.0, "rapl"), 2.0),  # before the first step there is no source
        ((2.0, "rapl"), (3.0, "rapl"), 1.0),
        ((2.0, "rapl"), (0.5, "cpu-time-estimate"), None),
        ((None, None), (3.0, "rapl"), None),
        ((2.0, "rapl"), (None, None), None),
    ],
)
def test_an_epochs_energy_comes_from_one_source(
    before: tuple[float | None, str | None],
    after: tuple[float | None, str | None],
    epoch: float | None,
) -> None:
    run: Any = None
    assert EpochStart(run, None, 0.0, *before).energy_kwh(*after) == epoch
