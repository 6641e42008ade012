"""Code that a checkpoint brings runs only where it was named on the command line, at one commit, and results say so."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import suite as package
from suite.backbones.code import code_digest
from suite.backbones.loading import build, identity, load_tokenizer, resolve
from suite.config.arm import Arm
from suite.config.space import LearningRateRange
from suite.config.sweep import BackboneChoice
from suite.config.sweep_files import load_sweep
from suite.config.trust import TRUSTED, trusting
from suite.errors import BackboneError, ConfigError
from suite.export import export
from suite.export.base import open_base
from suite.export.card import Facts
from suite.export.description import (
    FILE,
    BasePlace,
    Description,
    Format,
    read_description,
)
from suite.plan.definition import read_plan, store_definition
from suite.plan.plan import PlannedCell
from suite.record.folder import Home, TrialFolder
from suite.train.arms import make_arm
from suite.train.restore import restore
from tests.commands import Suite, suite
from tests.records import cell_rows, make_spec, write_definition, write_trial
from tests.test_loading import head_of, save
from tests.trained import trained_spec, write_trained

__all__ = ["suite"]


CODE = """
from pathlib import Path
from transformers import BertForSequenceClassification

Path({canary!r}).touch()

class OwnBert(BertForSequenceClassification):
    own = True
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that brings the class of its model; its code leaves `ran` beside it."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.delenv(TRUSTED, raising=False)
    folder = tmp_path / f"own{time.time_ns()}"
    save("bert", folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "modeling_own.OwnBert"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(CODE.format(canary=str(tmp_path / "ran")))
    return folder


def choice(folder: Path, **fields: Any) -> BackboneChoice:
    return BackboneChoice(name=str(folder), tokenizer="bytes", **fields)


def trusted(folder: Path) -> tuple[BackboneChoice, str]:
    digest = code_digest(folder)
    return choice(folder, revision=digest, trust_remote_code=True), f"{folder}@{digest}"


def test_code_of_a_checkpoint_does_not_run_unasked_and_the_error_says_how(own: Path) -> None:
    with pytest.raises(
        BackboneError, match=r"brings code of its own \(modeling_own.OwnBert\)"
    ) as caught:
        resolve(choice(own))
    assert f"--trust-remote-code {own}@{code_digest(own)}" in str(caught.value)
    assert not (own.parent / "ran").exists()


def test_code_runs_where_it_was_named_and_the_result_says_which(own: Path) -> None:
    wanted, named = trusted(own)
    with trusting([named]):
        resolved = resolve(wanted)
        model = build(resolved, head_of("bert"))
        assert (own.parent / "ran").exists()
        assert getattr(model, "own", False), "the class is the checkpoint's own"
        assert getattr(build(resolved, head_of("bert"), meta=True), "own", False)
        assert load_tokenizer(resolved) is not None
        assert identity(resolved)["own_code"] == code_digest(own)


def test_a_stored_trial_grants_nothing(own: Path) -> None:
    wanted, named = trusted(own)
    with pytest.raises(BackboneError, match=f"allow it again with --trust-remote-code {named}"):
        resolve(wanted)
    with (
        trusting([f"other@{code_digest(own)}"]),
        pytest.raises(BackboneError, match="allow it again"),
    ):
        resolve(wanted)
    assert not (own.parent / "ran").exists()


def test_code_that_changed_is_not_what_was_named(own: Path) -> None:
    wanted, named = trusted(own)
    with (own / "modeling_own.py").open("a") as file:
        file.write("# more\n")
    with trusting([named]), pytest.raises(BackboneError, match="read it again, then name it"):
        resolve(wanted)
    assert not (own.parent / "ran").exists()


def test_code_from_another_repository_is_refused(own: Path) -> None:
    config = json.loads((own / "config.json").read_text())
    config["auto_map"] = {
        "AutoModelForSequenceClassification": "stranger/code--modeling_own.OwnBert"
    }
    (own / "config.json").write_text(json.dumps(config))
    wanted, named = trusted(own)
    with trusting([named]), pytest.raises(BackboneError, match="from another repository"):
        resolve(wanted)


@pytest.fixture
def elsewhere(own: Path) -> Path:
    """A folder of somebody else's code, which no hash of `own` covers; it leaves the same trace."""
    folder = own.parent / "elsewhere"
    folder.mkdir()
    (folder / "evil.py").write_text(CODE.format(canary=str(own.parent / "ran")))
    return folder


@pytest.mark.parametrize("place", ["{elsewhere}--evil.OwnBert", "{elsewhere}/evil.OwnBert"])
@pytest.mark.parametrize("task", ["AutoConfig", "AutoModel"])
def test_code_of_another_folder_is_refused(
    own: Path, elsewhere: Path, task: str, place: str
) -> None:
    config = json.loads((own / "config.json").read_text())
    config["auto_map"][task] = place.format(elsewhere=elsewhere)
    (own / "config.json").write_text(json.dumps(config))
    wanted, named = trusted(own)
    with trusting([named]), pytest.raises(BackboneError, match="from another repository or folder"):
        resolve(wanted)
    assert not (own.parent / "ran").exists()


@pytest.mark.parametrize(
    "auto_map", [{"AutoTokenizer": ["{}--evil.OwnBert", None]}, [None, "{}/evil.OwnBert"]]
)
def test_a_tokenizers_code_of_another_folder_is_refused(
    own: Path, elsewhere: Path, auto_map: Any
) -> None:
    text = json.dumps({"auto_map": auto_map}).replace("{}--", f"{elsewhere}--")
    (own / "tokenizer_config.json").write_text(text.replace("{}/", f"{elsewhere}/"))
    wanted, named = trusted(own)
    wanted = wanted.model_copy(update={"tokenizer": None})
    with trusting([named]), pytest.raises(BackboneError, match="from another repository or folder"):
        resolve(wanted)
    assert not (own.parent / "ran").exists()


def test_a_trusted_folder_has_no_code_behind_a_link_to_a_folder(own: Path, elsewhere: Path) -> None:
    (elsewhere / "evil.py").rename(elsewhere / "generate.py")
    digest = code_digest(own)
    # transformers runs this file of a trusted folder, whatever `auto_map` says
    (own / "custom_generate").symlink_to(elsewhere)
    wanted = choice(own, revision=digest, trust_remote_code=True)
    with (
        trusting([f"{own}@{digest}"]),
        pytest.raises(BackboneError, match="custom_generate: a link to a folder"),
    ):
        resolve(wanted)


def test_a_trusted_folder_has_regular_files_of_code_alone(own: Path) -> None:
    os.mkfifo(own / "more.py")
    with pytest.raises(BackboneError, match=r"more.py: expected a regular file"):
        code_digest(own)


def test_code_behind_a_link_counts_by_its_content(own: Path) -> None:
    before = code_digest(own)
    file = own / "modeling_own.py"
    # a snapshot in the hub's cache has links alone
    file.symlink_to(file.rename(own.parent / "blob"))
    assert code_digest(own) == before


def test_trust_that_nothing_needs_is_a_mistake(tmp_path: Path) -> None:
    save("bert", tmp_path / "plain")
    wanted, named = trusted(tmp_path / "plain")
    assert "own_code" not in identity(resolve(choice(tmp_path / "plain")))
    with trusting([named]), pytest.raises(BackboneError, match="brings no code of its own"):
        resolve(wanted)


@pytest.mark.parametrize(
    "item", ["bert", "bert@main", "bert@" + "0" * 39, "@" + "0" * 40, "bert@" + "A" * 40]
)
def test_trust_wants_a_name_and_a_whole_commit(suite: Suite, item: str) -> None:
    code, _, err = suite("params", "--backbone", "bert-base", "--trust-remote-code", item)
    assert code == 2
    assert "expected NAME@COMMIT" in err


def write_sweep(folder: Path, backbone: dict[str, Any]) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(
        json.dumps({"name": "x", "backbones": [backbone], "methods": ["full"], "tasks": ["sst2"]})
    )
    return path


def test_neither_a_file_nor_set_can_trust(tmp_path: Path) -> None:
    path = write_sweep(
        tmp_path, {"name": "org/model", "revision": "0" * 40, "trust_remote_code": True}
    )
    with pytest.raises(
        ConfigError,
        match=r"backbones\[0\]: trust_remote_code cannot be set there.*--trust-remote-code org/model@COMMIT",
    ):
        load_sweep(path)
    with pytest.raises(ConfigError, match="cannot be set there"):
        load_sweep(
            write_sweep(tmp_path, {"name": "org/model"}),
            ["backbones=[{name: a/b, trust_remote_code: true}]"],
        )
    with pytest.raises(ConfigError, match="cannot be set there"):
        make_arm(
            "org/model",
            "full",
            "pretrained",
            {"backbone": {"trust_remote_code": True, "revision": "0" * 40}},
        )
    with pytest.raises(ValidationError, match="40 digits of a commit"):
        BackboneChoice(name="org/model", trust_remote_code=True)


def test_the_command_line_trusts_and_pins(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, {"name": "org/model"})
    with trusting([f"org/model@{'1' * 40}"]):
        (backbone,) = load_sweep(path).backbones
        assert (backbone.trust_remote_code, backbone.revision) == (True, "1" * 40)
        with pytest.raises(ConfigError, match="give the same commit"):
            load_sweep(write_sweep(tmp_path, {"name": "org/model", "revision": "2" * 40}))
        with pytest.raises(ConfigError, match="no backbone of"):
            load_sweep(write_sweep(tmp_path, {"name": "org/other"}))
    (backbone,) = load_sweep(write_sweep(tmp_path, {"name": "org/model"})).backbones
    assert not backbone.trust_remote_code


def test_trust_is_shown_and_leaves_other_hashes_alone(tmp_path: Path) -> None:
    arm = Arm(backbone=BackboneChoice(name="minilm"), method="full")
    assert arm.key == "minilm.pretrained.full.6268f712", "as before there was a choice"
    spec = make_spec("full")
    own_arm = spec.arm.model_copy(
        update={
            "backbone": BackboneChoice(name="org/model", revision="1" * 40, trust_remote_code=True)
        }
    )
    spec = spec.model_copy(update={"arm": own_arm})
    home = Home(tmp_path)
    write_trial(home, spec)
    cell = PlannedCell(own_arm, spec.task, LearningRateRange(low=1e-6, high=1e-3))
    write_definition(home, ["full"], ["agreement"])
    store_definition(replace(read_plan(home, "demo"), cells=(cell,)), home)
    (row,) = cell_rows(home)
    assert row.own_code == "1" * 40


def test_an_arm_with_code_of_its_own_is_not_exported(tmp_path: Path, own: Path) -> None:
    wanted, named = trusted(own)
    home = Home(tmp_path / "home")
    with trusting([named]):
        folder, _ = write_trained(home, trained_spec("full", "bert", backbone=wanted))
        with pytest.raises(ConfigError, match="made by code of its checkpoint"):
            export(restore(folder, home), tmp_path / "out", Facts())
    assert not (tmp_path / "out").exists()
    with pytest.raises(BackboneError, match="allow it again"):
        restore(TrialFolder(folder.path), home)


# Folders that say of themselves that `suite export` wrote them


def describe(folder: Path, form: Format, base: BasePlace) -> Path:
    """Make an exported model of the checkpoint `folder`, as somebody else could; returns its folder."""
    place = folder
    if base == "copy":
        place = folder.rename(folder.with_name("base")).parent
    Description(
        format=form,
        base=base,
        base_identity={},
        arm=Arm(backbone=BackboneChoice(name="bert-base", tokenizer="bytes"), method="full"),
        head=asdict(head_of("bert")),
        dtype="float32",
        task="agreement",
        trial="0" * 16,
        seed=0,
    ).write(place)
    return place


@pytest.mark.parametrize(
    ("form", "base"),
    [("transformers", "none"), ("peft", "copy"), ("suite", "copy"), ("suite", "none")],
)
def test_code_of_an_exported_folder_does_not_run(
    suite: Suite, own: Path, form: Format, base: BasePlace
) -> None:
    folder = describe(own, form, base)
    with pytest.raises(BackboneError, match=r"brings code of its own \(modeling_own.OwnBert\)"):
        package.load(folder)
    code, _, err = suite("lm-eval", folder, "--home", own.parent)
    assert (code, "brings code of its own" in err) == (2, True), err
    assert not (own.parent / "ran").exists()


@pytest.mark.parametrize("base", ["none", "name"])
def test_an_exported_folder_cannot_trust_itself_nor_its_base(own: Path, base: BasePlace) -> None:
    folder = describe(own, "transformers", base)
    described = json.loads((folder / FILE).read_text())
    described["arm"]["backbone"] |= {
        "name": str(own),
        "revision": code_digest(own),
        "trust_remote_code": True,
    }
    (folder / FILE).write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="whoever starts the run decides whose code it runs"):
        package.load(folder)
    described["arm"]["backbone"] |= {"revision": "main", "trust_remote_code": False}
    (folder / FILE).write_text(json.dumps(described))
    with pytest.raises(BackboneError, match="brings code of its own"):
        package.load(folder)
    assert not (own.parent / "ran").exists()


def test_whoever_loads_an_exported_folder_can_trust_its_code(own: Path) -> None:
    folder = describe(own, "transformers", "none")
    with trusting([f"{folder}@{code_digest(folder)}"]):
        base = open_base(read_description(folder), folder)
        assert getattr(build(base, head_of("bert")), "own", False)
