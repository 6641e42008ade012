"""Every method of peft under ZeRO-3, where weights are cut: it trains, leaves alone what a trial does not keep, and writes
the same texts whether all weights are gathered at once or for every token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from suite.backbones.loading import Head, resolve
from suite.config.arm import Arm
from suite.config.space import load_space, peft_spaces
from suite.config.sweep import AttentionChoice
from suite.config.training import TrainingConfig
from suite.data.objective import Batch
from suite.meters import PhaseMeter
from suite.petl.arm import build_arm
from suite.train.engine import Engine
from suite.train.evaluate import evaluate, weights_at_hand
from suite.train.initial import buffer_sums, check_buffers
from tests.ranks import on_ranks
from tests.test_whole_weights import task
from tests.texts import write_pairs
from tests.tiny import tiny_choice
from tests.toy import disturb, loss_of, make_batch

T5 = tiny_choice("t5", d_model=128, d_kv=32)
"""Wide enough for the first choice of every search space."""
HEAD = Head("text")
PLENTY = 2**40
NOT_ON_T5 = {"peft:shadow": "it looks for the layers of a decoder"}
FEWER_ROWS = {"peft:eva": {"r": 4, "lora_alpha": 4}}
"""Its directions need more tokens than ranks."""
CUT = [
    ("peft:dora", "pretrained"),
    ("peft:glora", "pretrained"),
    ("peft:ia3", "pretrained"),
    ("peft:loha", "pretrained"),
    ("peft:lokr", "pretrained"),
    ("peft:lora", "pretrained"),
    ("peft:osf", "pretrained"),
    # Its `k` holds a weight that trains and one that does not.
    ("peft:ia3", "wgqa"),
    ("lora", "wgqa"),
]
"""Methods and attentions with frozen weights cut, too; the layers of most read weights of modules that nobody calls."""
Case = tuple[str, str, str]
"""Method, attention, frozen weights."""


def training(frozen: str) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "batch_size": 8,
            "max_length": 32,
            "target_max_length": 6,
            "frozen_weights": frozen,
        }
    )


def written(
    engine: Engine, batch: Batch, rank: int, folder: Path, usable_bytes: int | None
) -> tuple[list[Any], list[Any]]:
    """The texts of an evaluation, and the logits of three tokens: random weights write much that no text shows."""
    objective, data = task(folder, T5, training("resident"))
    asked = {key: tensor[rank::2] for key, tensor in batch.items() if key != "labels"}
    meter = PhaseMeter(torch.device("cpu"))
    at_hand = weights_at_hand([engine], objective, usable_bytes=usable_bytes, log=lambda line: None)
    with meter.phase("eval"), at_hand:
        (found,) = evaluate([engine], objective, data, meter, rank=rank, world_size=2, batch_size=2)
        tokens = engine.module.generate(  # type: ignore[operator]
            **asked,
            min_new_tokens=3,
            max_new_tokens=3,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return found.prediction, torch.stack(tokens.logits).tolist()


def tried(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    """A step, texts in both ways, and a step more."""
    name, attention, frozen = case
    torch.manual_seed(3)
    resolved = resolve(T5)
    arm = Arm(
        backbone=T5,
        method=name,
        architecture=FEWER_ROWS.get(name, load_space(name).architectures[0]),
        attention=AttentionChoice(name=attention),
    )
    model, petl = build_arm(resolved, HEAD, arm)
    batches = [make_batch(resolved.family, HEAD, seed=seed, size=8) for seed in range(2)]
    if petl.needs_preparation:
        rows = [make_batch(resolved.family, HEAD, seed=seed, size=1) for seed in range(40)]
        petl.prepare(model, resolved.family, rows, loss_of)
    # Or all would write what the backbone writes.
    disturb(model, scale=0.3)
    before = buffer_sums(model)
    engine = Engine(model, training(frozen), world_size=2, device="cpu")
    try:
        losses = []
        found: dict[str, Any] = {"losses": losses}
        for way, usable_bytes in (("for every token", None), ("whole", PLENTY)):
            engine.module.train()
            mine = {key: tensor[rank::2].contiguous() for key, tensor in batches[0].items()}
            losses.append(float(engine.step([(mine, 1.0)], 0.0)))
            engine.module.eval()
            found[way] = written(engine, batches[1], rank, folder, usable_bytes)
        engine.module.train()
        mine = {key: tensor[rank::2].contiguous() for key, tensor in batches[1].items()}
        losses.append(float(engine.step([(mine, 1.0)], 1e-3)))
        engine.check_mask()
        check_buffers(engine.module, before, "a step")
        assert engine.fingerprint(trained=False) == engine.frozen_fingerprint
    finally:
        engine.release()
    return found


def everything(rank: int, folder: Path) -> dict[Case, dict[str, Any]]:
    """All in one pair of processes: starting them costs more than what they do."""
    cases = [(name, "pretrained", "resident") for name in peft_spaces() if name not in NOT_ON_T5]
    cases += [(name, attention, "partitioned") for name, attention in CUT]
    found = {}
    for case in cases:
        try:
            found[case] = tried(rank, case, folder)
        except Exception as error:
            error.add_note(f"{case}")
            raise
    return found


@pytest.mark.slow
def test_it_trains_and_writes_the_same_texts_however_weights_are_gathered(tmp_path: Path) -> None:
    write_pairs(tmp_path / "data", train=8, validation=3, test=3)
    # Encoded here, so that the ranks find it.
    task(tmp_path, T5, training("resident"))
    for on_rank in on_ranks(everything, tmp_path, timeout_s=600.0):
        for case, found in on_rank.items():
            assert found["for every token"] == found["whole"], case
            assert all(math.isfinite(loss) for loss in found["losses"]), case
        assert len({str(found["whole"]) for found in on_rank.values()}) > 30
