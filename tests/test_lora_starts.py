"""LoRA's starts from training data, and peft's optimizers for it: by peft's own functions, under ZeRO-3, and taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft.optimizers.lorafa
import pytest
import torch
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

import suite as package
from suite.backbones.heads import Head
from suite.backbones.loading import build, resolve
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, BackboneChoice, LimitConfig
from suite.config.training import TrainingConfig
from suite.data.collate import IGNORED
from suite.errors import CheckpointError, ConfigError, DataError, IncompatibleError
from suite.export import export
from suite.export.card import Facts
from suite.meters import PhaseMeter
from suite.petl import get_method
from suite.petl._pruning import fixed_head
from suite.petl.arm import build_arm, full_architecture
from suite.petl.base import Batch
from suite.record.folder import Home
from suite.record.spec import Phase, TrialSpec
from suite.storage.workspace import Workspace
from suite.train.engine import Engine
from suite.train.initial import PREPARED, initial_model
from suite.train.loop import Trainer
from suite.train.process_group import close_process_group, free_port, init_process_group
from suite.train.restore import restore
from suite.train.warm import open_data
from tests.ranks import in_processes, on_ranks
from tests.test_loading import save
from tests.test_loop import make_spec
from tests.test_parity import ADAM_EPS, batch_of
from tests.tiny import tiny_choice
from tests.toy import Toy, logits_of, loss_of, make_head, resolved_tiny

STARTS = ("eva", "corda", "lora-ga")
ANSWERS = {"bert": "classification", "gpt2": "text", "llama": "classification", "t5": "text"}
ROUNDING = 1e-4
"""What moves between a weight and its adapter is rounded there (2e-6 was seen)."""
RANK = 4
RATE = 1e-2
WEIGHT = 1e3
"""Of the loss: the gradients of a tiny model are far below `ADAM_EPS`."""
RATIO = 16.0


def unprepared(method: str, family: str, **architecture: Any) -> Toy:
    torch.manual_seed(0)
    resolved = resolved_tiny(family)
    head = make_head(ANSWERS[family])  # type: ignore[arg-type]
    arm = Arm(backbone=resolved.choice, method=method, architecture={"r": RANK} | architecture)
    model, petl = build_arm(resolved, head, arm)
    return Toy(model, petl, resolved, head)


def prepare(toy: Toy, rows: int = 48) -> None:
    examples = [toy.batch(seed=number, size=1) for number in range(rows)]
    toy.method.prepare(toy.model, toy.family, examples, loss_of)


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@pytest.mark.parametrize("family", ANSWERS)
@pytest.mark.parametrize("start", STARTS)
def test_a_start_changes_the_adapters_and_not_the_answers(start: str, family: str) -> None:
    toy = unprepared(f"peft:{start}", family)
    before = logits_of(toy.model, toy.batch(seed=99))
    drawn = [layer.lora_A["default"].weight.clone() for layer in layers(toy.model)]
    masks = {name: p.requires_grad for name, p in toy.model.named_parameters()}
    state = torch.random.get_rng_state()
    prepare(toy)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {name: p.requires_grad for name, p in toy.model.named_parameters()} == masks
    after = logits_of(toy.model, toy.batch(seed=99))
    torch.testing.assert_close(after, before, rtol=0.0, atol=ROUNDING)
    for layer, old in zip(layers(toy.model), drawn, strict=True):
        a = layer.lora_A["default"].weight
        assert not torch.allclose(a, old)
        # the base moved exactly where B is not 0
        assert (layer.lora_B["default"].weight.abs().max() == 0) == (start == "eva")
        if start == "eva":
            torch.testing.assert_close(a @ a.T, torch.eye(RANK), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_corda_reads_every_choice_of_a_row_by_itself(family: str) -> None:
    resolved = resolved_tiny(family)
    head = Head("choice")
    arm = Arm(backbone=resolved.choice, method="peft:corda", architecture={"r": RANK})
    toy = Toy(*build_arm(resolved, head, arm), resolved, head)
    texts = [toy.batch(seed=number, size=2) for number in range(24)]
    # the two texts of a batch become the two choices of one row
    rows = [{name: tensor[None] for name, tensor in batch.items()} for batch in texts]
    for row in rows:
        row["labels"] = torch.zeros(1, dtype=torch.long)
    before = logits_of(toy.model, rows[0])
    toy.method.prepare(toy.model, toy.family, rows, loss_of)
    assert all(layer.lora_B["default"].weight.abs().max() > 0 for layer in layers(toy.model))
    torch.testing.assert_close(logits_of(toy.model, rows[0]), before, rtol=0.0, atol=ROUNDING)


def padded(row: Batch, inputs: int, labels: int) -> Batch:
    """A row of T5's at these lengths; 0 = without padding."""
    length = int(row["attention_mask"].sum())
    wide = max(inputs - length, 0)
    found = {
        name: pad(row[name][:, :length], (0, wide)) for name in ("input_ids", "attention_mask")
    }
    width = row["labels"].shape[1]
    return {**found, "labels": pad(row["labels"], (0, max(labels - width, 0)), value=IGNORED)}


@pytest.mark.parametrize(("inputs", "labels"), [(16, 16), (16, 8)])
@pytest.mark.parametrize("start", ["eva", "corda"])
def test_padding_moves_no_start_of_an_encoder_decoder(start: str, inputs: int, labels: int) -> None:
    toy = unprepared(f"peft:{start}", "t5")
    rows = []
    for number in range(48):
        row = toy.batch(seed=number, size=1)
        # the decoder, too, reads more different tokens than the rank
        rows.append(row | {"labels": row["input_ids"][:, : 2 + number % 3]})
    found = []
    for widths in ((0, 0), (inputs, labels)):
        toy = unprepared(f"peft:{start}", "t5")
        examples = [padded(row, *widths) for row in rows]
        toy.method.prepare(toy.model, toy.family, examples, loss_of)
        found.append([layer.lora_A["default"].weight for layer in layers(toy.model)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.0, atol=ROUNDING)


def test_lora_ga_starts_along_the_gradient_of_the_whole_weight() -> None:
    toy = unprepared("peft:lora-ga", "llama")
    other = unprepared("peft:lora-ga", "llama")
    prepare(toy)
    weights = [layer.get_base_layer().weight for layer in layers(other.model)]
    other.model.eval()
    with fixed_head(other.model, other.family):  # type: ignore[arg-type]
        for number in range(48):
            for weight in weights:
                weight.requires_grad_(True)
            # the mean over rows, as every row has one label
            (loss_of(other.model, other.batch(seed=number, size=1)) / 48).backward()
    for layer, weight in zip(layers(toy.model), weights, strict=True):
        directions = torch.linalg.svd(weight.grad)[2][:RANK]
        cosines = torch.linalg.svdvals(directions @ layer.lora_A["default"].weight.T)
        # the decomposition is a random one, so its last direction is the least exact
        assert cosines.min() > 0.95


@pytest.mark.parametrize(
    ("method", "architecture", "message"),
    [
        ("peft:lora", {"eva_config": {"rho": 1.0}}, "read with init_lora_weights: eva alone"),
        ("peft:lora", {"init_lora_weights": "eva"}, "rho: 1.0"),
        ("peft:eva", {"eva_config": {"rho": 2.0}}, "data decide the ranks"),
        ("peft:corda", {"corda_config": {"cache_file": "x"}}, "the home's cache keeps"),
        ("peft:lora", {"loraplus_lr_ratio": 0.5}, "got 0.5, expected 1 to 1000"),
        ("peft:lora", {"lora_fa": "yes"}, "got 'yes', expected true or false"),
        ("peft:eva", {"lora_fa": True}, "does not fit init_lora_weights: eva"),
        ("peft:vera", {"lora_fa": True}, "lora_fa"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    method: str, architecture: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        get_method(method).configure(architecture)


def test_what_has_no_data_or_too_few_directions_says_so() -> None:
    toy = unprepared("peft:corda", "bert")
    with pytest.raises(DataError, match="got no training example"):
        toy.method.prepare(toy.model, toy.family, [], loss_of)
    with pytest.raises(IncompatibleError, match="r 20 needs 40 directions, but there are only 32"):
        unprepared("peft:lora-ga", "bert", r=20)


# ---- under ZeRO-3 -------------------------------------------------------------------------------


def fresh(method: str, **architecture: Any) -> Any:
    return unprepared(method, "bert", lora_dropout=0.0, **architecture).model


def plainly(method: str) -> dict[str, torch.Tensor]:
    """Three steps in one process, for LoRA+ with peft's own optimizer."""
    model = fresh(method)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, eps=ADAM_EPS)
    if method == "peft:lora-plus":
        optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=RATIO, eps=ADAM_EPS
        )
    walk(model, optimizer, scale=WEIGHT)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def walk(model: nn.Module, optimizer: Any, *, scale: float) -> None:
    """Three steps."""
    model.train()
    for step in range(3):
        optimizer.zero_grad()
        (scale * model(**batch_of("bert", step)).loss).backward()
        optimizer.step()


def test_lora_fa_takes_the_steps_of_pefts_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    # else peft rounds the corrected gradient to bf16
    monkeypatch.setattr(peft.optimizers.lorafa, "is_bf16_available", lambda: False)
    theirs = fresh("peft:lora")
    optimizer = create_lorafa_optimizer(theirs, r=RANK, lora_alpha=8, lr=RATE)
    ours = fresh("peft:lora-fa")
    trained = [p for p in ours.parameters() if p.requires_grad]
    own = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, eps=1e-12)
    # peft and torch add eps at different places, so it must not matter
    optimizer.param_groups[0]["eps"] = 1e-12
    for model, of_model in ((theirs, optimizer), (ours, own)):
        walk(model, of_model, scale=1e4)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.requires_grad == ("lora_B" in name or "classifier" in name)
        torch.testing.assert_close(parameter, expected[name], rtol=0.0, atol=1e-5)


def trial(folder: Path, seed: int) -> TrialSpec:
    backbone = BackboneChoice(name=str(folder / "backbone"), tokenizer="bytes")
    return make_spec(
        phase=Phase.CONFIRM,
        arm=Arm(
            backbone=backbone,
            method="peft:lora-ga",
            architecture=full_architecture("peft:lora-ga", {"r": RANK}),
        ),
        training=TrainingConfig(epochs=1, batch_size=16, eval_batch_size=16, max_length=32),
        limit=LimitConfig(train=32, validation=8, test=8),
        world_size=2,
        seed=seed,
    )


def prepared_by_seeds(_number: int, folder: Path) -> list[str]:
    """Names of what two seeds prepare over a checkpoint, and of what they do over drawn weights."""
    found = []
    for attention in ({"name": "gqa"}, {"name": "gqa", "options": {"init": "random"}}):
        for seed in (1, 2):
            spec = trial(folder, seed)
            arm = spec.arm.model_copy(update={"attention": AttentionChoice(**attention)})
            spec = spec.model_copy(update={"arm": arm, "world_size": 1})
            home = Home(folder)
            resolved, objective, data = open_data(spec, Workspace(home))
            meter = PhaseMeter(torch.device("cpu"))
            with meter.phase("load"):
                _, record = initial_model(
                    spec,
                    resolved,
                    objective,
                    data,
                    weights=None,
                    cache=home.cache,
                    device="cpu",
                    meter=meter,
                )
            assert record is not None
            found.append(record.key)
    return found


def test_weights_that_a_variant_draws_by_seed_reach_no_other_seed(tmp_path: Path) -> None:
    save("bert", tmp_path / "backbone")
    ((one, other, first, second),) = on_ranks(prepared_by_seeds, tmp_path, world_size=1)
    assert one == other and len({one, first, second}) == 3


def on_rank(rank: int, folder: Path, trainer_port: int, port: int) -> Any:
    """Two trials of LoRA-GA, and three steps with each of peft's optimizers."""
    trainer = Trainer(
        Workspace(Home(folder / "home")),
        rank=rank,
        world_size=2,
        local_rank=rank,
        master_port=trainer_port,
    )
    found = []
    engines = set()
    for seed in (1, 2):
        trainer.start(trial(folder, seed))
        report = trainer.epoch()
        engines.add(id(trainer._warm))
        result = trainer.finish()
        assert report.record is not None and result.preparation is not None
        found.append((report.record.train_loss, result.preparation.reused))
    trainer.close()
    init_process_group(
        rank=rank, world_size=2, local_rank=rank, address="127.0.0.1", port=port, device="cpu", timeout_s=120
    )  # fmt: skip
    states = {}
    for method in ("peft:lora-plus", "peft:lora-fa"):
        petl = get_method(method).configure({})
        model = fresh(method)
        training = TrainingConfig(batch_size=8, gradient_clipping=0.0, adam_eps=ADAM_EPS)
        engine = Engine(
            model, training, world_size=2, device="cpu", factors=petl.learning_rate_factors(model)
        )
        engine.module.train()
        for step in range(3):
            mine = {
                key: value[rank::2].contiguous() for key, value in batch_of("bert", step).items()
            }
            engine.step([(mine, WEIGHT)], RATE)
        states[method] = engine.trained_state()
        engine.release()
    close_process_group()
    return found, len(engines), states


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("starts")
    torch.manual_seed(7)
    whole: PreTrainedModel = build(resolve(tiny_choice("bert")), Head("classification", 2))
    whole.base_model.save_pretrained(folder / "backbone")
    return folder, in_processes(on_rank, folder, free_port(), free_port(), count=2)[0]


@pytest.mark.parametrize("method", ["peft:lora-plus", "peft:lora-fa"])
def test_an_optimizer_is_the_same_under_zero_3(method: str, ranks: Any) -> None:
    expected = plainly(method)
    got = ranks[1][2][method]
    assert got.keys() == expected.keys()
    assert any("lora_A" in name for name in got) == (method == "peft:lora-plus")
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_trial_prepares_once_and_its_model_comes_back(ranks: Any, tmp_path: Path) -> None:
    folder, (trials, engines, _) = ranks
    losses = [loss for loss, _ in trials]
    assert losses[0] != losses[1]
    assert [reused for _, reused in trials] == [False, True]
    assert engines == 1, "the prepared base is the same for all seeds"
    home = Home(folder / "home")
    restored = restore(home.trial(trial(folder, 1)), home)
    written = export(restored, tmp_path / "out", Facts())
    assert written.description.format == "suite"
    texts = [("a", "b"), ("one text", "another text")]
    loaded = package.load(tmp_path / "out")
    assert len(loaded.predict(texts)) == 2
    (prepared,) = home.cache.rglob(PREPARED)
    prepared.write_text("cut")
    with pytest.raises(
        CheckpointError, match="prepared from data is no longer whole in the home's cache"
    ):
        restore(home.trial(trial(folder, 1)), home)
    assert prepared.exists(), "who reads removes nothing"
