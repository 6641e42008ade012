"""What comes from elsewhere cannot run code, leave its folder or fill the memory: files of all kinds, and names."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import ArrowInvalid
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

import suite as package
from suite.backbones.loading import resolve
from suite.config.loader import MAX_BYTES, parse_value, parse_yaml
from suite.config.names import KINDS
from suite.config.sweep import BackboneChoice, SweepConfig
from suite.config.sweep_files import load_sweep
from suite.config.task import ClassificationTask
from suite.data.prepare import Prepared
from suite.errors import BackboneError, ConfigError, StorageError, SuiteError, TrackingError
from suite.export import export
from suite.export.card import Facts
from suite.files import sha256
from suite.leaderboard.fields import Row, with_values
from suite.leaderboard.file import SCHEMA_VERSION, write_rows
from suite.leaderboard.row import score_fields
from suite.petl import get_method
from suite.plan.definition import known_plan, read_plan
from suite.record.cells import read_cells
from suite.record.folder import MARKER, Home
from suite.record.lm_eval import read_record
from suite.record.spec import TrialSpec
from suite.report import build
from suite.report.compose import Form, write
from suite.report.data import Report
from suite.storage.identity import home_id
from suite.tracking import exchange
from suite.tracking.exchange import ResultsFile, read_results
from suite.tracking.rows import NAMES, TAG, read_rows, runs_with_rows
from suite.tracking.store import ARTIFACTS, StoredRun, open_store
from suite.tracking.sweep_runs import SweepRuns
from suite.train.checkpoint import UnusableError, check_files, read_marker
from suite.train.restore import restore
from suite.train.shards import Shards, shard_name
from tests.records import make_spec
from tests.test_loading import save
from tests.trained import trained_spec, write_trained


class Canary:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")

    @property
    def sang(self) -> bool:
        return self.path.exists()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    """Whatever a test does, it must not sing."""
    bird = Canary(tmp_path / "canary")
    yield bird
    assert not bird.sang, "a file of somebody else's was unpickled, or ran"


def plant(bird: Canary, *paths: Path) -> None:
    """One half as torch writes it, the other as pickle does; each by its turn."""
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 2:
            torch.save({"weight": bird}, path)
        else:
            path.write_bytes(pickle.dumps(bird))


def tries(*readers: Callable[[], Any]) -> None:
    """Call all; what they raise does not matter here."""
    for reader in readers:
        with suppress(Exception):
            reader()


def test_the_canary_sings_where_a_pickle_is_read(tmp_path: Path) -> None:
    for number in (0, 1):
        bird = Canary(tmp_path / f"canary-{number}")
        files = [tmp_path / "a", tmp_path / "b"]
        plant(bird, *files)
        assert not bird.sang
        if number:
            torch.load(files[1], weights_only=False)
        else:
            pickle.loads(files[0].read_bytes())
        assert bird.sang


# Files of a home


FILES = (
    *(
        "spec.json",
        "result.json",
        "epochs.jsonl",
        "failure-0.json",
        "best.safetensors",
        "model.safetensors",
        "lm-eval.json",
    ),
    *(
        "predictions-validation.parquet",
        "predictions-test.parquet",
        "pytorch_model.bin",
        "optimizer.pt",
    ),
    *(
        "checkpoint/epoch-1/COMMIT.json",
        "checkpoint/epoch-1/shard-0.safetensors",
        "checkpoint/epoch-1/mp_rank_00_model_states.pt",
    ),
)


@pytest.mark.parametrize("turn", [0, 1])
def test_nothing_in_a_home_is_unpickled(canary: Canary, tmp_path: Path, turn: int) -> None:
    home = Home(tmp_path / "home")
    folder, _ = write_trained(home, trained_spec("lora", "bert"))
    names = FILES[turn:] + FILES[:turn]
    whole = {"spec.json", "result.json"}  # so that the readers come as far as the weights
    plant(canary, *(folder.path / name for name in names if name not in whole))
    tries(
        lambda: restore(folder, home),
        folder.epochs,
        folder.failures,
        lambda: read_record(folder.path),
    )
    generation = folder.checkpoint / "epoch-1"
    with pytest.raises(UnusableError, match=f"{MARKER} cannot be read"):
        read_marker(generation, 1)
    with pytest.raises(UnusableError, match="holds other bytes than were written"):
        check_files(
            generation,
            {shard_name(0): {"bytes": (generation / shard_name(0)).stat().st_size, "sha256": ""}},
        )
    with pytest.raises(SafetensorError):
        Shards([generation / shard_name(0)])
    cells = read_cells(home, "demo")
    assert cells, "the trial is one of the home's"
    tries(lambda: [score_fields(cell.confirmed(), cell.search) for cell in cells.values()])
    plant(canary, *(folder.path / name for name in names))
    tries(
        folder.spec, folder.result, lambda: read_cells(home, "demo"), lambda: restore(folder, home)
    )
    sweeps = home.path / "sweeps"
    plant(
        canary,
        sweeps / "demo.json",
        sweeps / "demo.cells",
        sweeps / "demo.driver",
    )
    tries(lambda: read_plan(home, "demo"))


def test_a_cache_of_tokenised_data_is_not_unpickled(canary: Canary, tmp_path: Path) -> None:
    prepared = Prepared(tmp_path, {}, "", None)
    plant(canary, tmp_path / "train.arrow", tmp_path / "test.arrow")
    # The error says that the file was read, and read as Arrow.
    with pytest.raises(ArrowInvalid):
        prepared.split("train", confirm=False)
    with pytest.raises(ArrowInvalid):
        prepared.split("test", confirm=True)


@pytest.mark.parametrize("method", ["full", "lora", "read"])
def test_an_exported_model_is_not_unpickled(canary: Canary, tmp_path: Path, method: str) -> None:
    home = Home(tmp_path / "home")
    target = tmp_path / "model"
    folder, _ = write_trained(home, trained_spec(method, "bert"))
    export(restore(folder, home), target, Facts())
    weights = list(target.rglob("*.safetensors"))
    assert weights
    for path in weights:
        plant(canary, path.with_name("pytorch_model.bin"), path.with_name("adapter_model.bin"))
    package.load(target)  # what lies beside the weights is not looked at
    for path in weights:
        path.unlink()
    with pytest.raises((SuiteError, OSError, ValueError)):
        package.load(target)
    plant(canary, *weights)
    tries(lambda: package.load(target))


def test_a_backbone_of_pickled_weights_is_refused(canary: Canary, tmp_path: Path) -> None:
    save("bert", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    plant(canary, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(BackboneError, match="pickled weights are not read"):
        resolve(BackboneChoice(name=str(tmp_path / "model"), tokenizer="bytes"))


def adapter_of(other: Path) -> str:
    return json.dumps({"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(other)})


def test_a_backbone_is_no_adapter_of_another_folder(tmp_path: Path) -> None:
    save("bert", tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text(adapter_of(tmp_path / "other"))
    with pytest.raises(BackboneError, match=r"holds adapter_config.json.* of another checkpoint"):
        resolve(BackboneChoice(name=str(tmp_path / "model"), tokenizer="bytes"))


def test_an_exported_model_takes_no_weights_from_elsewhere(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    target = tmp_path / "model"
    folder, _ = write_trained(home, trained_spec("full", "bert"))
    export(restore(folder, home), target, Facts())
    config = target / "adapter_config.json"
    weights = target / "model.safetensors"
    config.write_text(adapter_of(shutil.copytree(target, tmp_path / "other")))
    with pytest.raises(BackboneError, match="of another checkpoint"):
        package.load(target)
    config.unlink()
    with safe_open(weights, framework="pt") as file:
        places = dict.fromkeys(file.keys(), "../other/model.safetensors")
    weights.unlink()
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    with pytest.raises(BackboneError, match="expected files beside it"):
        package.load(target)


def test_an_exported_adapter_takes_no_weights_from_elsewhere(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    target = tmp_path / "model"
    folder, _ = write_trained(home, trained_spec("lora", "bert"))
    export(restore(folder, home), target, Facts())
    path = target / "adapter_config.json"
    written = json.loads(path.read_text())
    # peft would load what the first two name
    for change, said in (
        ({"peft_type": "XLORA", "adapters": {"a": str(target)}}, "got 'XLORA'"),
        ({"peft_type": "SHADOW", "shadow_model": str(target)}, "shadow_model: got"),
        ({"peft_type": ["LORA"]}, "peft_type: got"),
        ({"peft_type": None}, "peft_type: got None"),
    ):
        path.write_text(json.dumps(written | change))
        with pytest.raises(ConfigError, match=said):
            package.load(target)


def test_a_sweep_takes_no_shadow_network_from_elsewhere() -> None:
    with pytest.raises(ConfigError, match="shadow_model: got 'org/name', expected mirror"):
        get_method("peft:shadow").configure({"shadow_model": "org/name"})


# Results of others


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_imported_results_are_not_unpickled(canary: Canary, tmp_path: Path, suffix: str) -> None:
    for number in range(2):
        path = tmp_path / f"results{suffix}"
        plant(canary, *[path] * (number + 1))
        with pytest.raises(TrackingError, match=r"not (a )?whole"):
            read_results(path)


def test_imported_results_have_an_end(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    deep = tmp_path / "deep.json"
    with huge.open("wb") as file:
        file.truncate(exchange.MAX_BYTES + 1)  # takes no room
    with pytest.raises(TrackingError, match="expected at most 536,870,912"):
        read_results(huge)
    deep.write_text("[" * 200_000)
    with pytest.raises(TrackingError, match="not whole JSON"):
        read_results(deep)


# YAML


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", ":2: not valid YAML: aliases"),
        ("a: 1\na: 2", ":2: not valid YAML: key 'a' is given twice"),
        (
            "a: !!python/object/apply:os.system ['touch canary']",
            "tags are not allowed",
        ),
        ("a: !!python/name:os.system", "tags are not allowed"),
        ("a: 1\nb: !!timestamp x", ":2: not valid YAML: tags are not allowed"),
        ("a: !!bool x", "tags are not allowed"),
        ("a: 1\nb: \x07", ":2: not valid YAML: character U+0007"),
        ('a: "\\0"', "character U+0000 in a text"),
        ('a: "\\ud800"', "character U+D800 in a text"),
        ("a: .inf", ".inf is no finite number"),
        ("a: .nan", ".nan is no finite number"),
        ("a: 1.0e+999", "1.0e+999 is no finite number"),
        ("a: 100000000000000000000000", "has more than 64 bits"),
        ("a: " + "[" * 400_000, "nested more than 50 levels deep"),
        ("- " * 300_000, "nested more than 50 levels deep"),
        ("a: " + "1:" * 400_000 + "1", "a number of 800,001 digits"),
        ("a: " + "9" * 900_000, "a number of 900,000 digits"),
        ("a:\n" + "-\n" * 100_001, "more than 100,000 keys and values"),
        ("? {a: 1}\n: 2", "is not text"),
        ("a,b\n1,2", "expected YAML of keys and values, got plain text"),
        ("- a", "got a list"),
        ("# to be written", "got nothing"),
    ],
    ids=lambda given: repr(given[:20]),
)
def test_yaml_that_attacks_is_refused_in_seconds(text: str, said: str) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, where="sweep.yaml")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500, "the error does not repeat the file"
    assert time.process_time() - start < 30


def test_a_huge_yaml_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="expected at most 1,000,000"):
        load_sweep(path)


def test_set_is_as_strict_as_a_file() -> None:
    for text in (
        *("[" * 100, "!!python/name:os.system", "!!timestamp x", "1:" * 100_000 + "1"),
        *("\x07", ".inf", "1e400"),
    ):
        with pytest.raises(ConfigError, match="not a valid value"):
            parse_value(text, where="--set a")


# Names that end up in paths


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "..", ".x", "A", "x" * 65, "a\nb"])
def test_a_sweeps_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        SweepConfig.model_validate(
            {"name": name, "backbones": ["bert-base"], "methods": ["full"], "tasks": ["sst2"]}
        )


def test_a_stored_trial_cannot_name_files_elsewhere() -> None:
    spec = make_spec().model_dump(mode="json")
    for change in (
        {"task": {**spec["task"], "name": "../../x"}},
        {"task": {**spec["task"], "name": ".."}},
        {"arm": {**spec["arm"], "pretrain": "../../x"}},
    ):
        with pytest.raises(ValidationError):
            TrialSpec.model_validate(spec | change)
    assert ClassificationTask.model_validate(spec["task"]).name == "agreement"


WAYS_OUT = ("../../x", "/x", "..", "a\n", "a\0b", "")
ROW = Row(
    home="abc",
    sweep="demo",
    backbone="bert-base",
    method="full",
    task="sst2",
    arm="bert-base.pretrained.full.1f2e3d4c",
    status="partial",
    digest="d",
)


@pytest.mark.parametrize("suffix", ["json", "parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_rows_cannot_name_a_way_out(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"results.{suffix}"

    def written(row: Row) -> Path:
        if suffix == "parquet":
            write_rows(path, [row])
            return path
        file = ResultsFile(
            schema_version=SCHEMA_VERSION, suite_version=package.__version__, rows=[vars(row)]
        )
        path.write_text(file.model_dump_json())
        return path

    assert read_results(written(ROW)) == [ROW]
    for name in WAYS_OUT:
        with pytest.raises(TrackingError, match=rf"got (the {kind} '|nothing for {kind})"):
            read_results(written(with_values(ROW, **{kind: name})))


def test_a_store_cannot_name_a_way_out(empty_db: Path, tmp_path: Path) -> None:
    shutil.copy(empty_db, tmp_path / "mlflow.db")
    store = open_store(Home(tmp_path).tracking_uri)
    # Whoever reaches the store can put rows and experiments there without `suite import-results`.
    runs = SweepRuns(store, home="abc", sweep="demo")
    runs.publish([with_values(ROW, sweep="../../x")])
    with pytest.raises(TrackingError, match=r"got the sweep '../../x'"):
        build(tmp_path, "demo")
    store.experiment("../../x")
    store.client.create_experiment("mine", tags={"suite.kind": "sweep", "suite.sweep": "../../x"})
    assert list(store.experiments()) == ["demo"]
    with pytest.raises(TrackingError, match=r"unknown sweep '../../x'"):
        build(tmp_path, "../../x")
    run = StoredRun(
        id="../../x",
        status="FINISHED",
        start_ms=0,
        tags={},
        files=f"file:///nowhere/{ARTIFACTS}/../../x/artifacts",
    )
    with pytest.raises(TrackingError), store.file(run, "rows.parquet"):
        pass


def test_a_store_cannot_name_a_file_elsewhere(empty_db: Path, tmp_path: Path) -> None:
    shutil.copy(empty_db, tmp_path / "mlflow.db")
    store = open_store(Home(tmp_path).tracking_uri)
    SweepRuns(store, home="abc", sweep="demo").publish([ROW])
    (run,) = runs_with_rows(store)
    outside = tmp_path / "outside.parquet"
    write_rows(outside, [with_values(ROW, method="lora")])
    # The digest is right, so that only the name is wrong.
    for name in (str(outside), f"../../../{outside.name}", "/dev/zero", ""):
        store.log(run.id, tags={TAG: f"{name} {sha256(outside)}"})
        with pytest.raises(TrackingError, match=r"expected one of leaderboard-0\.parquet"):
            read_rows(store)
    inside = tmp_path / ARTIFACTS / run.id / "artifacts" / NAMES[0]
    store.log(run.id, tags={TAG: f"{NAMES[0]} {sha256(outside)}"})
    inside.unlink()
    # Reading this would never end.
    inside.symlink_to("/dev/zero")
    with pytest.raises(TrackingError, match="not there"):
        read_rows(store)


@pytest.mark.parametrize("name", ["../../x", "", "a b", "a' or '"])
def test_a_home_cannot_name_a_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "tracking-id").write_text(name)
    with pytest.raises(StorageError, match="got the home"):
        home_id(Home(tmp_path))
    with pytest.raises(ConfigError, match=r"got the sweep '../../x'"):
        known_plan(Home(tmp_path), "../../x")


def test_a_report_is_written_into_its_folder_alone(tmp_path: Path) -> None:
    inside = tmp_path / "home" / "report"
    report = Report(sweep="../../x", rows=[], cells={}, trials=[], plan=None, unread_trials=0)
    for form in (Form.HTML, Form.CSV):
        for path in write(report, inside, form):
            assert path.parent == inside, path
    assert sorted(tmp_path.iterdir()) == [tmp_path / "home"]
    assert sorted((tmp_path / "home").iterdir()) == [inside]


@pytest.mark.parametrize(
    "name", ["package:torch/../pytest", "package:torch//etc", "package:../x", "package:torch/"]
)
def test_a_backbone_in_a_package_stays_in_it(name: str) -> None:
    with pytest.raises(BackboneError, match=r"leads out of|expected package:NAME/FOLDER"):
        resolve(BackboneChoice(name=name))


@pytest.mark.parametrize(
    "stray", ["../outside.safetensors", "/outside.safetensors", "sub/outside.safetensors"]
)
def test_an_index_of_weights_names_files_beside_it(tmp_path: Path, stray: str) -> None:
    folder = tmp_path / "model"
    save("bert", folder)
    os.rename(folder / "model.safetensors", tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": stray}}))
    with pytest.raises(BackboneError, match="expected files beside it"):
        resolve(BackboneChoice(name=str(folder), tokenizer="bytes"))
