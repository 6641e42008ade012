"""Pre-training objectives against hand-made batches, and the batches that ranks see."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import ByT5Tokenizer

from suite.backbones.loading import build, load_tokenizer, resolve
from suite.config.arm import Arm
from suite.config.sweep import BackboneChoice
from suite.config.task import GeneratedData, PretrainTask
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED
from suite.data.make_objective import make_objective
from suite.data.objective import Objective
from suite.data.pretraining import MASK_FRAC, RANDOM_FRAC, segments, sentinels
from suite.errors import IncompatibleError
from suite.petl.arm import build_arm
from suite.train.batches import TrainBatches
from tests.tiny import FAMILIES, tiny_choice

KINDS = {"bert": "encoder", "gpt2": "decoder", "llama": "decoder", "t5": "encoder-decoder"}
OBJECTIVES = {"bert": "mlm", "gpt2": "causal-lm", "llama": "causal-lm", "t5": "span-corruption"}


class Rigged:
    """Stands in for a random generator; gives what it was told to."""

    def __init__(
        self,
        permutations: list[list[int]],
        uniform: list[float] | None = None,
        tokens: list[int] | None = None,
    ) -> None:
        self.permutations = permutations
        self.uniform = uniform
        self.tokens = tokens

    def permutation(self, of: Any) -> np.ndarray[Any, Any]:
        chosen = np.asarray(self.permutations.pop(0))
        return chosen if isinstance(of, int) else np.asarray(of)[chosen]

    def random(self, count: int) -> np.ndarray[Any, Any]:
        assert self.uniform is not None
        return np.asarray(self.uniform[:count])

    def integers(self, low: int, high: int, count: int) -> np.ndarray[Any, Any]:
        assert self.tokens is not None
        return np.asarray(self.tokens[:count])


def task(family: str = "bert", **changes: Any) -> PretrainTask:
    values: dict[str, Any] = {
        "name": "toy",
        "description": "",
        "source": "ours",
        "data": GeneratedData(generator="entailment"),
        "inputs": ["premise", "hypothesis"],
        "objective": OBJECTIVES[family],
        "start": "random",
        "corrupted_frac": 0.15,
        "mean_span_tokens": 3.0,
    }
    return PretrainTask(**(values | changes))


def objective(family: str, max_length: int, **changes: Any) -> Objective:
    training = TrainingConfig(max_length=max_length)
    return make_objective(
        task(family, **changes),
        kind=KINDS[family],
        tokenizer=ByT5Tokenizer(),
        training=training,
        decoder_objective="head",
    )  # type: ignore[arg-type]


def rows(goal: Objective, count: int = 12) -> Dataset:
    """Blocks of a made-up corpus, in the columns that `prepare` would write."""
    columns = {
        "premise": [f"row {i} of the corpus" for i in range(count)],
        "hypothesis": ["and more"] * count,
    }
    (part,) = goal.features([(["x"] * count, columns)], "train")
    return Dataset.from_dict(part)


# ---- objectives ----------------------------------------------------------------------------------------------------------


def test_masking_hides_most_of_the_chosen_tokens_and_swaps_and_keeps_the_rest() -> None:
    goal: Any = objective("bert", 8, corrupted_frac=0.4)
    assert goal.wanted == 3 and goal.block_tokens == 8, "bytes have neither a start nor a separator"
    end = ByT5Tokenizer().eos_token_id
    mask = sentinels(ByT5Tokenizer(), 1)[0]
    block = np.array(
        [50, 51, end, 53, 54, 55, 56, 57]
    )  # without the separator, places 0 1 3 4 5 6 7 can be chosen
    read, labels = goal.corrupt(block, Rigged([[2, 0, 6]], uniform=[0.79, 0.85, 0.95], tokens=[99]))
    assert read == [99, 51, end, mask, 54, 55, 56, 57]
    assert labels == [50, IGNORED, IGNORED, 53, IGNORED, IGNORED, IGNORED, 57]


def test_a_start_and_a_separator_stand_around_a_block_of_a_tokenizer_that_has_them() -> None:
    tokenizer = load_tokenizer(resolve(BackboneChoice(name="minilm")))
    training = TrainingConfig(max_length=10)
    goal: Any = make_objective(
        task("bert"),
        kind="encoder",
        tokenizer=tokenizer,
        training=training,
        decoder_objective="head",
    )
    assert (goal.block_tokens, goal.mask, goal.separator) == (
        8,
        tokenizer.mask_token_id,
        tokenizer.sep_token_id,
    )
    read, labels = goal.corrupt(np.arange(1000, 1008), np.random.default_rng(0))
    assert (read[0], read[-1], labels[0], labels[-1]) == (
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        IGNORED,
        IGNORED,
    )
    assert (
        goal.encode({"premise": ["a cat"], "hypothesis": ["a dog"]})["input_ids"]
        == tokenizer(["a cat", "a dog"], add_special_tokens=False)["input_ids"]
    )


def test_masking_draws_in_the_published_shares() -> None:
    goal: Any = objective("bert", 100)
    block = np.arange(100, 200)
    counts = Counter[str]()
    draw = np.random.default_rng(0)
    for _ in range(400):
        read, labels = (np.asarray(x) for x in goal.corrupt(block, draw))
        chosen = np.flatnonzero(labels != IGNORED)
        assert (
            len(chosen) == 15
            and (labels[chosen] == block[chosen]).all()
            and (np.delete(read, chosen) == np.delete(block, chosen)).all()
        )
        masked = read[chosen] == goal.mask
        kept = (read[chosen] == block[chosen]) & ~masked
        counts["mask"] += masked.sum()
        counts["kept"] += kept.sum()
        counts["any"] += (~masked & ~kept).sum()
    for kind, share in (
        ("mask", MASK_FRAC),
        ("any", RANDOM_FRAC),
        ("kept", 1 - MASK_FRAC - RANDOM_FRAC),
    ):
        # five standard deviations of a share of 6,000 draws; a random token is the old one, or the mask, in 2 of 384 draws
        assert counts[kind] / 6000 == pytest.approx(share, abs=0.027), kind


def test_a_causal_block_predicts_every_token_but_its_first() -> None:
    goal: Any = objective("gpt2", 5)
    assert goal.separator == ByT5Tokenizer().eos_token_id
    assert goal.corrupt(np.array([7, 8, 9, 10, 11]), None) == (
        [7, 8, 9, 10, 11],
        [IGNORED, 8, 9, 10, 11],
    )
    assert goal.predicted_tokens([7, 8, 9, 10, 11]) == 4


def test_spans_become_sentinels_and_the_target_lists_them() -> None:
    goal: Any = objective("t5", 8, corrupted_frac=0.375, mean_span_tokens=1.5)
    assert (goal.block_tokens, goal.hidden, goal.spans) == (8, 3, 2)
    tokenizer = ByT5Tokenizer()
    first, second, end = (
        *tokenizer.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_1>"]),
        tokenizer.eos_token_id,
    )
    read, target = goal.corrupt(np.arange(10, 18), Rigged([[1], [0]]))  # keep 2 and 3, hide 1 and 2
    assert read == [10, 11, first, 13, 14, 15, second, end]
    assert target == [first, 12, second, 16, 17, end]
    assert goal.predicted_tokens(range(8)) == len(target)


def test_t5s_blocks_fill_the_input_as_the_paper_says() -> None:
    """512 tokens of input come from 568 of text and give 114 of target (T5's code)."""
    goal: Any = objective("t5", 512)
    read, target = goal.corrupt(np.full(goal.block_tokens, 40), np.random.default_rng(0))
    assert (goal.block_tokens, len(read), len(target)) == (568, 512, 114)


@pytest.mark.parametrize(
    ("corrupted_frac", "mean_span_tokens"), [(0.5, 4.0), (0.7, 8.0), (0.8, 32.0), (0.1, 10.0)]
)
def test_blocks_fill_the_input_whatever_is_corrupted(
    corrupted_frac: float, mean_span_tokens: float
) -> None:
    goal: Any = objective(
        "t5", 512, corrupted_frac=corrupted_frac, mean_span_tokens=mean_span_tokens
    )
    read, _ = goal.corrupt(np.full(goal.block_tokens, 40), np.random.default_rng(0))
    assert 511 <= len(read) <= 512


def test_spans_that_cannot_be_kept_apart_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"raise pretrain\.mean_span_tokens"):
        objective("t5", 512, corrupted_frac=0.6, mean_span_tokens=1.0)


def test_a_random_cut_has_parts_of_every_size_and_their_sum() -> None:
    draw = np.random.default_rng(0)
    cuts = [tuple(segments(5, 2, draw).tolist()) for _ in range(200)]
    assert set(cuts) == {(1, 4), (2, 3), (3, 2), (4, 1)}
    assert segments(3, 1, draw).tolist() == [3] and segments(3, 3, draw).tolist() == [1, 1, 1]


def test_a_tokenizer_without_sentinels_lends_its_last_tokens() -> None:
    tokenizer = load_tokenizer(resolve(BackboneChoice(name="minilm")))
    assert sentinels(tokenizer, 2) == [len(tokenizer) - 1, len(tokenizer) - 2]
    with pytest.raises(
        IncompatibleError, match=r"126 sentinels.*<extra_id_125>.*pretrain\.max_length"
    ):
        sentinels(ByT5Tokenizer(), 126)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_per_token_of_a_block_is_the_models_own(family: str) -> None:
    """What validation sums is what training minimises, and every predicted token is counted once."""
    goal = objective(family, 16)
    resolved = resolve(tiny_choice(family))
    torch.manual_seed(0)
    model, _ = build_arm(resolved, goal.head, Arm(backbone=resolved.choice, method="full"))
    data = [dict(row) for row in rows(goal)][:3]
    batch = goal.collate(data)
    predicted = sum(row["units"] for row in data)
    assert sum(len(ids[ids != IGNORED]) for ids in batch["labels"]) == predicted
    assert batch["input_ids"].shape == (3, 16)
    with torch.no_grad():
        loss = float(model.eval()(**batch).loss)
        nll = goal.predict(model, batch, synced=False)
    assert goal.score(nll, [row["gold"] for row in data])["loss"] == pytest.approx(loss, rel=1e-5)
    assert goal.collate(data)["input_ids"].equal(batch["input_ids"]), (
        "validation is corrupted the same way every time"
    )


def test_a_decoder_computes_no_loss_that_validation_drops() -> None:
    """The loss is in float32 over a whole batch, which may not fit into memory."""
    goal = objective("gpt2", 16)
    model: Any = build(resolve(tiny_choice("gpt2")), goal.head).eval()
    losses: list[Any] = []
    model.loss_function = lambda *args, **kwargs: losses.append(args)
    batch = goal.collate([dict(row) for row in rows(goal)][:3])
    with torch.no_grad():
        assert len(goal.predict(model, batch, synced=False)) == 3
    assert not losses


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_two_ranks_and_a_resumed_run_see_the_batches_of_one(family: str) -> None:
    goal = objective(family, 16)
    data = rows(goal)

    def batches(rank: int = 0, world_size: int = 1) -> TrainBatches:
        size = {"batch_size": 4, "micro_batch_size": 4 // world_size, "epoch_steps": 3}
        return TrainBatches(data, goal.collate, rank=rank, world_size=world_size, **size)  # type: ignore[arg-type]

    def inputs(of: TrainBatches, epochs: list[int]) -> list[torch.Tensor]:
        return [
            part["input_ids"]
            for n in epochs
            for parts, _, _ in of.epoch(n, lambda turn: 100 + turn)
            for part, _ in parts
        ]

    one = batches()
    assert len(one) == 3 and one.pass_steps * 4 != 12, "an epoch is not a pass"
    whole = inputs(one, [1, 2, 3, 4])
    first, second = (inputs(batches(rank, 2), [1, 2, 3, 4]) for rank in (0, 1))
    for global_batch, left, right in zip(whole, first, second, strict=True):
        assert global_batch[0::2].equal(left) and global_batch[1::2].equal(right)
    assert all(a.equal(b) for a, b in zip(whole[6:], inputs(batches(), [3, 4]), strict=True))
    steps = one.pass_steps
    assert sorted(map(tuple, torch.cat(whole[:steps]).tolist())) != sorted(
        map(tuple, torch.cat(whole[steps : 2 * steps]).tolist())
    ), "every pass is corrupted anew"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_objective_of_another_kind_of_backbone_is_refused(family: str) -> None:
    wrong = "mlm" if family != "bert" else "causal-lm"
    with pytest.raises(
        IncompatibleError,
        match=rf"{wrong} does not go with an {KINDS[family]} backbone; use {OBJECTIVES[family]}",
    ):
        objective(family, 16, objective=wrong)
