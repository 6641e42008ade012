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

from suite.attention import variants
from suite.cli import main
from suite.config.arm import Arm
from suite.config.sweep import AttentionChoice, MethodChoice, SweepConfig
from suite.errors import ConfigError, OtherCodeError, OwnCodeError
from suite.meters import PhaseMeter
from suite.petl import get_method, methods
from suite.petl.own_code import check_own_code, own_code
from suite.plan.plan import make_plan
from suite.record.folder import Home
from suite.record.spec import TrialSpec
from suite.storage.workspace import Workspace
from suite.train.by_hand import build_spec
from suite.train.initial import _prepare
from suite.train.restore import open_trained
from suite.train.warm import build_warm
from tests.commands import Suite, blocks, suite
from tests.records import make_result, make_spec
from tests.tiny import tiny_choice

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
