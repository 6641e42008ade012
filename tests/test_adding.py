"""docs/adding.md, taken literally: its method and its attention variant train together, from a folder outside the project."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import suite as package
from suite.attention import variants
from suite.cli import main
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, MethodChoice, SweepConfig
from suite.errors import ConfigError, OtherCodeError, OwnCodeError
from suite.export import export
from suite.export.card import Facts
from suite.export.plain import as_plain
from suite.meters import PhaseMeter
from suite.petl import get_method, methods
from suite.petl.own_code import check_own_code, own_code
from suite.plan.plan import make_plan
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.by_hand import build_spec
from suite.train.initial import _prepare
from suite.train.restore import open_trained, restore
from suite.train.warm import build_warm
from tests.commands import Suite, blocks, suite
from tests.records import make_result, make_spec
from tests.tiny import tiny_choice
from tests.trained import trained_spec, write_trained

__all__ = ["suite"]
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 384,
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's own with both files, by the names that the page gives them."""
    method, variant = blocks("python")[:2]
    files = {
        "petl/scale_norms.py": method,
        "attention/first_head.py": variant,
        "search_spaces/scale-norms.yaml": blocks("yaml")[0],
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("SUITE_PATH", str(tmp_path))
    return tmp_path


def test_the_method_and_the_variant_of_the_docs_train_together(suite: Suite, mine: Path) -> None:
    settings = {f"backbone.config.{key}": value for key, value in TINY.items()}
    settings |= {
        "backbone.tokenizer": "bytes",
        "limit.train": 32,
        "limit.validation": 16,
        "limit.test": 16,
        "learning_rate": 0.01,
    }
    settings |= {
        "training.epochs": 1,
        "training.batch_size": 8,
        "training.max_length": 48,
        "last": 3,
    }
    changes = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    names = [
        "--backbone",
        "bert-base",
        "--method",
        "scale-norms",
        "--attention",
        "first-head",
        "--task",
        "acceptability",
    ]
    code, out, err = suite("trial", *names, *changes, "--home", mine / "home")
    assert code == 0, err
    result = json.loads(out[out.index("{\n") :])
    assert (result["status"], result["splits"]["train"]) == ("completed", 32)
    parameters = result["parameters"]
    assert parameters["trainable"] - parameters["trainable_head"] == 3 * TINY["hidden_size"], (
        "the last three norms' gains, and nothing else"
    )


def test_both_are_listed_with_their_descriptions(suite: Suite, mine: Path) -> None:
    for kind, name in (
        ("methods", "scale-norms"),
        ("attention", "first-head"),
        ("search-spaces", "scale-norms"),
    ):
        rows = json.loads(suite("list", kind, "--format", "json")[1])
        assert name in [row["name"] for row in rows]


def told(suite: Suite, *arguments: object) -> dict[str, Any]:
    """What a command prints as JSON."""
    printed: dict[str, Any] = json.loads(suite(*arguments, "--format", "json")[1])
    return printed


def test_the_method_is_counted_and_searched_as_it_is_written(suite: Suite, mine: Path) -> None:
    counted = told(suite, "params", "--backbone", "minilm", "--method", "scale-norms")
    # Two norms in each of 6 blocks, one after the embeddings.
    assert counted["method_trainable"] == 13 * 384
    sweep = {
        "name": "own",
        "backbones": [{"name": "bert-base", "config": TINY, "tokenizer": "bytes"}],
        "methods": ["scale-norms"],
        "tasks": ["acceptability"],
    }
    (mine / "own.yaml").write_text(yaml.safe_dump(sweep))
    planned = told(suite, "run", mine / "own.yaml", "--dry-run", "--home", mine / "home")
    assert planned["cells"][0]["learning_rate"] == [1e-4, 3e-2]


def test_the_variant_is_counted_as_it_is_written(suite: Suite, mine: Path) -> None:
    def counts(variant: str, backbone: str, *options: str) -> dict[str, Any]:
        return told(suite, "params", "--backbone", backbone, "--attention", variant, *options)

    three = ("--set", "attention.options.kv_heads=3")
    first, mean = (counts(name, "bert-base", *three) for name in ("first-head", "gqa"))
    whole = "attention.with_output_projection"
    assert first[whole] == mean[whole]
    assert counts("first-head", "t5-base")["kv_fraction"] == 1 / 12


@pytest.mark.parametrize(
    ("file", "line", "missing"),
    [
        ("petl/scale_norms.py", "    Config = ScaleNormsArchitecture\n", "method: .* Config"),
        ("petl/scale_norms.py", '    source = "ours"\n', "method: .* source"),
        ("backbones/gemma.py", '    model_types = ("gemma",)\n', "backbone family: .* model_types"),
    ],
)
def test_what_a_class_of_ones_own_lacks_is_told_with_its_file(
    suite: Suite, mine: Path, file: str, line: str, missing: str
) -> None:
    (mine / "backbones").mkdir()
    (mine / "backbones/gemma.py").write_text(blocks("python")[2])
    text = (mine / file).read_text()
    assert line in text
    (mine / file).write_text(text.replace(line, ""))
    code, _, err = suite("params", "--backbone", "minilm", "--method", "scale-norms")
    assert code == 2
    assert re.match(f"error: {mine / file}: class .* is no whole {missing}$", err)


def test_a_file_without_a_class_of_its_axis_is_told_by_its_name(suite: Suite, mine: Path) -> None:
    file = mine / "petl/scale_norms.py"
    file.write_text(file.read_text().replace("(Method[ScaleNormsArchitecture])", ""))
    code, _, err = suite("params", "--backbone", "minilm", "--method", "scale-norms")
    assert code == 2 and "unknown method 'scale-norms'; " in err
    assert f"({file} was read, and defines no subclass of Method)" in err


RAISE = "raise ValueError('boom')"


@pytest.mark.parametrize(
    ("file", "line", "other", "said"),
    [
        ("petl/scale_norms.py", "freeze(model)", RAISE, "ValueError: boom"),
        ("petl/scale_norms.py", "return model", "return None", "returns None, expected the model"),
        ("attention/first_head.py", "surgery.place(site, maps)", RAISE, "ValueError: boom"),
    ],
)
def test_what_code_of_ones_own_raises_is_told_with_file_and_line(
    suite: Suite, mine: Path, file: str, line: str, other: str, said: str
) -> None:
    text = (mine / file).read_text()
    (mine / file).write_text(text.replace(line, other))
    arm = ["--backbone", "minilm", "--method", "scale-norms", "--attention", "first-head"]
    code, _, err = suite("params", *arm)
    number = text.partition("def attach" if "None" in said else line)[0].count("\n") + 1
    assert code == 2
    assert err.startswith(f"error: {mine / file}:{number}: ") and said in err


def test_what_ones_own_preparation_raises_is_told_with_file_and_line(mine: Path) -> None:
    file = mine / "petl/scale_norms.py"
    text, after = file.read_text().split("    def expected_trainable", 1)
    text += f"    def prepare(self, *given):\n        {RAISE}\n\n"
    file.write_text(f"{text}    def expected_trainable{after}")
    line = text.count("\n") - 1
    method = get_method("scale-norms").configure({})
    given: Any = SimpleNamespace(family=None)
    with pytest.raises(OwnCodeError, match=rf"^{re.escape(str(file))}:{line}: ValueError: boom$"):
        _prepare(nn.Linear(2, 2), method, given, iter(()), device="cpu", meter=given)


def test_an_exception_in_a_shipped_method_stays_a_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch, mine: Path
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(methods.get("bitfit"), "attach", broken)
    with pytest.raises(KeyError, match="a bug"):
        main(["params", "--backbone", "minilm", "--method", "bitfit"])


def test_the_variant_says_how_many_heads_it_takes(suite: Suite, mine: Path) -> None:
    five = ("--set", "attention.options.kv_heads=5")
    code, _, err = suite("params", "--backbone", "minilm", "--attention", "first-head", *five)
    assert code == 2 and "set options.kv_heads to one of [1, 2, 3, 4, 6, 12]" in err


def test_an_edited_file_of_ones_own_gives_new_trials(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arms() -> dict[str, Arm]:
        # As another process would read the folders.
        for registry in (methods, variants):
            monkeypatch.setattr(registry, "_scanned", None)
        config = SweepConfig(
            name="mine",
            backbones=[tiny_choice("bert")],
            attention=[AttentionChoice(), AttentionChoice(name="first-head")],
            methods=[MethodChoice(name="scale-norms"), MethodChoice(name="full")],
            tasks=["sst2"],
        )
        plan = make_plan(config, where="mine.yaml")
        return {f"{c.arm.attention.name}/{c.arm.method}": c.arm for c in plan.cells}

    before = arms()
    assert arms() == before
    assert before["pretrained/full"].code is None
    assert "code" not in before["pretrained/full"].model_dump(mode="json"), "keys stay"
    for edited, changed in (
        ("petl/scale_norms.py", {"pretrained/scale-norms", "first-head/scale-norms"}),
        ("attention/first_head.py", {"first-head/scale-norms", "first-head/full"}),
    ):
        with (mine / edited).open("a") as file:
            file.write("# another version\n")
        after = arms()
        assert {name for name in after if after[name].key != before[name].key} == changed
        before = after


def test_a_trial_by_hand_of_an_edited_file_is_another_trial(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spec() -> TrialSpec:
        monkeypatch.setattr(methods, "_scanned", None)
        choice = tiny_choice("bert").model_dump(mode="json")
        name = choice.pop("name")
        shape = {"config": choice["config"], "tokenizer": choice["tokenizer"]}
        return build_spec(name, "scale-norms", "sst2", values={"backbone": shape})

    before = spec()
    assert spec().hash == before.hash
    with (mine / "petl/scale_norms.py").open("a") as file:
        file.write("# another version\n")
    assert spec().hash != before.hash


def test_a_host_with_another_file_of_ones_own_trains_nothing_and_says_which(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = tiny_choice("bert")
    text = (mine / "petl/scale_norms.py").read_text()
    # It hides a shipped method, which a host without the file would train in its place.
    (mine / "petl/bitfit.py").write_text(text.replace("ScaleNorms", "BitFit"))
    code = own_code(backbone, AttentionChoice(), "bitfit", where="here")
    arm = Arm(backbone=backbone, method="bitfit", code=code)
    check_own_code(arm)
    new = arm.model_copy(update={"method": "scale-norms"})
    spec: Any = SimpleNamespace(arm=arm)
    with (mine / "petl/bitfit.py").open("a") as file:
        file.write("# an older copy\n")
    monkeypatch.setattr(methods, "_scanned", None)
    other = own_code(backbone, AttentionChoice(), "bitfit", where="there")
    said = f"{socket.gethostname()}: arm {arm.key}: got your files with hash {other}, expected your"
    with pytest.raises(ConfigError, match=f"^{said} files with hash {code} .SUITE_PATH={mine}, "):
        build_warm(spec, Workspace(Home(mine)), device="cpu", meter=PhaseMeter(torch.device("cpu")))
    with pytest.raises(OtherCodeError, match=f"expected your files with hash {code}"):
        open_trained(spec, make_result(make_spec()), Home(mine))
    monkeypatch.setenv("SUITE_PATH", "plugins")
    for lacking in (arm, new):
        with pytest.raises(OtherCodeError, match="got the suite's own code, expected your files"):
            check_own_code(lacking)
    # A host that has others finds no such name among them.
    monkeypatch.setenv("SUITE_PATH", str(mine))
    (mine / "petl/scale_norms.py").unlink()
    monkeypatch.setattr(methods, "_scanned", None)
    with pytest.raises(
        OtherCodeError, match=r"got .*unknown method 'scale-norms'.*, expected your"
    ):
        check_own_code(new)
    # A host may have files that the driver does not.
    with pytest.raises(OtherCodeError, match="expected the suite's own code"):
        check_own_code(arm.model_copy(update={"code": None}))


# ---- what a trial keeps, and what is sent on ---------------------------------------------------------------------------


TEMPER = """
from torch import nn, ones
from suite.attention._route import HeadTransform, route
from suite.attention.base import Options, Variant

class Temper(HeadTransform):
    def __init__(self, like):
        super().__init__()
        self.scale = nn.Parameter(ones(1, dtype=like.dtype, device=like.device))

    def forward(self, q, k, v):
        return q * self.scale, k, v

class TemperVariant(Variant[Options]):
    description, source, Config = "a learned temperature", "ours", Options

    def convert(self, model, family):
        for site in family.attention_sites(model):
            route(site.module, Temper(next(site.module.parameters())))
"""
NEW = """
    def new_parameters(self, model, family):
        return [p for name, p in model.named_parameters() if name.endswith("scale")]
"""
LORA_NORM = """
from suite.petl.lora import Lora

class LoraNorm(Lora):
    description, source = "LoRA and norms", "ours"

    def attach(self, model, family):
        model = super().attach(model, family)
        for _, norm in family.norms(model):
            norm.weight.requires_grad_(True)
        return model

    def expected_trainable(self, model, family):
        norms = sum(norm.weight.numel() for _, norm in family.norms(model))
        return super().expected_trainable(model, family) + norms
"""


def test_a_parameter_that_a_variant_of_ones_own_adds_is_trained_or_told(
    suite: Suite, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = mine / "attention/temper.py"
    file.write_text(TEMPER)
    arm = ("params", "--backbone", "minilm", "--method", "bitfit", "--attention", "temper")
    code, _, err = suite(*arm)
    assert code == 2
    assert err.startswith(f"error: {file}: attention variant temper adds the parameter ")
    file.write_text(TEMPER + NEW)
    monkeypatch.setattr(variants, "_scanned", None)
    code, out, err = suite(*arm, "--format", "json")
    assert code == 0, err
    plain = json.loads(suite(*arm[:-2], "--format", "json")[1])
    # one in each of the six layers
    assert json.loads(out)["trainable"] == plain["trainable"] + 6


def test_a_wrapper_of_ones_own_without_a_config_is_told_at_once(suite: Suite, mine: Path) -> None:
    file = mine / "petl/scale_norms.py"
    wrapped = "wrapped = nn.Module()\n        wrapped.inner = model\n        return wrapped"
    file.write_text(file.read_text().replace("return model", wrapped))
    code, _, err = suite("params", "--backbone", "minilm", "--method", "scale-norms")
    assert code == 2 and "returns a Module without `config`" in err


def test_a_buffer_that_changes_is_told_because_a_trial_keeps_parameters_alone() -> None:
    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

    method: Any = SimpleNamespace(name="whiten", prepare=lambda model, *_: model.norm(torch.eye(2)))
    given: Any = SimpleNamespace(family=None)
    with pytest.raises(OwnCodeError, match=r"^prepare of method whiten changed the buffer norm\."):
        _prepare(Whitened(), method, given, iter(()), device="cpu", meter=given)


def test_a_variant_of_ones_own_is_a_plain_model_only_if_it_says_so(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    spec = trained_spec("full", "bert", attention=AttentionChoice(name="first-head"))
    folder, _ = write_trained(home, own_spec(spec))
    assert as_plain(restore(folder, home)) is None
    file = mine / "attention/first_head.py"
    said = "    Config = FirstHeadOptions\n"
    file.write_text(file.read_text().replace(said, f"{said}    is_plain_folded = True\n"))
    monkeypatch.setattr(variants, "_scanned", None)
    folder, _ = write_trained(home, own_spec(spec))
    assert as_plain(restore(folder, home)) is not None


def test_a_method_of_ones_own_that_trains_more_than_its_parent_is_exported_whole(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = mine / "petl/lora_norm.py"
    file.write_text(LORA_NORM)
    home = Home(tmp_path / "home")
    folder, model = write_trained(home, own_spec(trained_spec("lora-norm", "bert")))
    # Norms that moved by next to nothing change no answer.
    monkeypatch.setattr("suite.export.same.TOLERANCES", {torch.float32: 1e9})
    written = export(restore(folder, home), tmp_path / "out", Facts())
    assert written.description.format == "suite"
    loaded = dict(package.load(tmp_path / "out").model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[name], parameter)
    file.write_text(LORA_NORM + "# another version\n")
    monkeypatch.setattr(methods, "_scanned", None)
    with pytest.raises(OtherCodeError, match="got your files with hash"):
        package.load(tmp_path / "out")


def own_spec(spec: TrialSpec) -> TrialSpec:
    """The trial with the hash of the user's files as they are now."""
    code = own_code(spec.arm.backbone, spec.arm.attention, spec.arm.method, where="here")
    return spec.model_copy(update={"arm": spec.arm.model_copy(update={"code": code})})


def test_a_method_without_a_search_space_is_told_which_file_to_write(mine: Path) -> None:
    (mine / "search_spaces/scale-norms.yaml").unlink()
    config = SweepConfig(
        name="mine",
        backbones=[tiny_choice("bert")],
        methods=[MethodChoice(name="scale-norms")],
        tasks=["sst2"],
    )
    files = [f"{root}/search_spaces/scale-norms.yaml" for root in (mine, Path.cwd())]
    said = f"scale-norms: method 'scale-norms' has no search space; write {' or '.join(files)} "
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_plan(config, where="mine.yaml")


def test_a_mistake_in_a_search_space_of_ones_own_is_not_blamed_on_the_sweep(mine: Path) -> None:
    (mine / "search_spaces/scale-norms.yaml").write_text(
        "description: gains\nsource: ours\nlearning_rate: {low: 1.0e-4, high: 3.0e-2}\n"
        "architectures: [{lst: 3}]\n"
    )
    config = SweepConfig(
        name="mine",
        backbones=[tiny_choice("bert")],
        methods=[MethodChoice(name="scale-norms")],
        tasks=["sst2"],
    )
    said = r"scale-norms: architectures of its search space: .*unknown key 'lst'; did you mean last"
    with pytest.raises(ConfigError, match=said):
        make_plan(config, where="mine.yaml")


def test_an_option_of_ones_own_with_a_capital_name_is_named(suite: Suite, mine: Path) -> None:
    file = mine / "petl/scale_norms.py"
    file.write_text(file.read_text().replace("last:", "K:").replace("config.last", "config.K"))
    arm = ("--backbone", "minilm", "--method", "scale-norms", "--set", "architecture.K=x")
    code, _, err = suite("params", *arm)
    assert code == 2 and "K: Input should be a valid integer" in err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[-self.config.last :]", "[:0]"), "leaves nothing to train beside the task head"),
        (("freeze(model)", "pass"), " parameters to train beside the task head, and its expected"),
        (("return sum(", "return 1 + sum("), "expected_trainable says 4,"),
    ],
)
def test_a_method_of_ones_own_that_trains_what_it_does_not_count_is_told_before_a_sweep(
    suite: Suite, mine: Path, change: tuple[str, str], says: str
) -> None:
    file = mine / "petl/scale_norms.py"
    text = file.read_text()
    assert text.count(change[0]) == 1
    file.write_text(text.replace(*change))
    code, _, err = suite("params", "--backbone", "minilm", "--method", "scale-norms")
    assert code == 2 and err.startswith(f"error: {file}:") and says in err


def test_two_files_of_ones_own_with_one_name_are_refused(suite: Suite, mine: Path) -> None:
    first = mine / "petl/scale-norms.py"
    second = mine / "petl/scale_norms.py"
    first.write_text(second.read_text())
    said = f"error: {second}: defines the method 'scale-norms', as {first} does"
    for command in ("params --backbone minilm --method scale-norms", "list methods"):
        code, _, err = suite(*command.split())
        assert code == 2 and err.startswith(said), command


def test_a_file_of_ones_own_that_exits_is_told(suite: Suite, mine: Path) -> None:
    file = mine / "petl/scale_norms.py"
    file.write_text(file.read_text() + "\nimport sys\nsys.exit()\n")
    code, _, err = suite("params", "--backbone", "minilm", "--method", "scale-norms")
    assert code == 2 and f"{file}: cannot be imported: SystemExit" in err
    file.write_text(file.read_text().replace("\nimport sys\nsys.exit()\n", ""))
    file.write_text(file.read_text().replace("freeze(model)", "raise SystemExit(0)"))
    code, _, err = suite("params", "--backbone", "minilm", "--method", "scale-norms")
    assert code == 2 and err.startswith(f"error: {file}:") and "SystemExit: 0" in err
