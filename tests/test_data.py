"""Sources, splits, checks and the tokenised cache, on parquet files written here."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from transformers import ByT5Tokenizer

from suite.config.sweep import LimitConfig
from suite.config.task import SplitConfig, TaskConfig, load_task, make_task
from suite.config.training import TrainingConfig
from suite.data.make_objective import make_objective
from suite.data.objective import Objective
from suite.data.prepare import Prepared, prepare
from suite.data.splits import plan_splits
from suite.errors import ConfigError, DataError

HUB = "someone/pairs"


def task(**changes: Any) -> TaskConfig:
    fields = {
        "name": "pairs",
        "description": "test",
        "source": "test",
        "data": {"hub": HUB},
        "inputs": ["a", "b"],
        "label": {"words": ["no", "yes"]},
        "text_to_text": "a: {a} b: {b}",
        "metrics": ["accuracy"],
    }
    return make_task({**fields, **changes}, where="test")


def rows(count: int, start: int = 0) -> dict[str, list[Any]]:
    numbers = range(start, start + count)
    return {
        "a": [f"first {i}" for i in numbers],
        "b": [f"second {i}" for i in numbers],
        "label": [i % 2 for i in numbers],
    }


def write(root: Path, split: str, columns: dict[str, list[Any]]) -> Path:
    path = root / HUB / "default" / f"{split}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "data", "train", rows(20))
    write(tmp_path / "data", "validation", rows(11, start=100))
    write(tmp_path / "data", "test", {**rows(5), "label": [-1] * 5})
    return tmp_path / "data"


def objective(of: TaskConfig, **training: Any) -> Objective:
    return make_objective(
        of,
        kind="encoder",
        tokenizer=ByT5Tokenizer(),
        training=TrainingConfig(**training),
        decoder_objective="head",
    )


def prepared(
    root: Path | None,
    of: TaskConfig | None = None,
    *,
    limit: LimitConfig | None = None,
    **training: Any,
) -> Prepared:
    of = of or task()
    cache = (root or Path("none")).parent / "cache"
    return prepare(
        of, objective(of, **training), limit=limit or LimitConfig(), data_root=root, cache=cache
    )


# splits


@pytest.mark.parametrize(
    ("train", "validation", "expected"),
    [
        (
            9_999,
            1_043,
            {"train": 9_999, "validation": 521, "test": 522},
        ),  # CoLA's validation split has 1,043 rows
        (10_000, 872, {"train": 9_000, "validation": 1_000, "test": 872}),
        (
            67_349,
            872,
            {"train": 66_349, "validation": 1_000, "test": 872},
        ),  # SST-2, as READ's table 6
    ],
)
def test_read_rule_gives_the_papers_sizes(
    train: int, validation: int, expected: dict[str, int]
) -> None:
    plan = plan_splits(
        SplitConfig(), {"train": train, "validation": validation}, LimitConfig(), where="t"
    )
    assert {name: len(part.rows) for name, part in plan.items()} == expected


@pytest.mark.parametrize("train", [500, 12_000])
def test_splits_are_disjoint_and_cover_their_sources(train: int) -> None:
    plan = plan_splits(SplitConfig(), {"train": train, "validation": 300}, LimitConfig(), where="t")
    used = [(part.source, int(row)) for part in plan.values() for row in part.rows]
    assert len(set(used)) == len(used) == train + 300


def test_splits_do_not_change_between_releases() -> None:
    plan = plan_splits(SplitConfig(), {"train": 500, "validation": 20}, LimitConfig(), where="t")
    assert plan["validation"].rows.tolist() == [0, 4, 6, 9, 10, 11, 12, 14, 18, 19]


def test_a_smaller_limit_draws_a_subset_and_never_more_than_there_is() -> None:
    def drawn(limit: int) -> set[int]:
        plan = plan_splits(
            SplitConfig(), {"train": 500, "validation": 20}, LimitConfig(train=limit), where="t"
        )
        return set(plan["train"].rows.tolist())

    assert drawn(50) < drawn(100) < drawn(9_999)
    assert (len(drawn(50)), len(drawn(9_999))) == (50, 500)
    assert drawn(50) != set(range(50))


def test_holding_out_all_of_train_is_refused() -> None:
    with pytest.raises(DataError, match=r"held_out is 20,000, but there are 12,000"):
        plan_splits(
            SplitConfig(held_out=20_000),
            {"train": 12_000, "validation": 9},
            LimitConfig(),
            where="t",
        )


def test_half_of_one_validation_row_is_an_empty_split() -> None:
    with pytest.raises(DataError, match="split 'validation' is empty"):
        plan_splits(SplitConfig(), {"train": 10, "validation": 1}, LimitConfig(), where="t")


def test_a_group_larger_than_a_half_is_told_as_the_reason() -> None:
    groups = {"train": np.arange(400), "validation": np.zeros(100, dtype=np.int64)}
    with pytest.raises(DataError, match="no group fits into half of its rows; use other splits"):
        plan_splits(
            SplitConfig(),
            {"train": 400, "validation": 100},
            LimitConfig(),
            where="t",
            groups=groups,
        )


def test_groups_that_do_not_fit_are_told_as_the_reason() -> None:
    groups = {"train": np.repeat(np.arange(4), 100)}
    with pytest.raises(DataError, match=r"no group fits into the 80 rows of splits\.held_out"):
        plan_splits(
            SplitConfig(rule="held-out", held_out=80),
            {"train": 400},
            LimitConfig(),
            where="t",
            groups=groups,
        )


def test_mnli_chooses_on_mismatched_and_reports_matched() -> None:
    sizes = {"train": 392_702, "validation_mismatched": 9_832, "validation_matched": 9_815}
    plan = plan_splits(load_task("mnli").splits, sizes, LimitConfig(), where="mnli")
    assert [(part.source, len(part.rows)) for part in plan.values()] == list(sizes.items())


# preparing


def test_rows_are_found_again_by_split_and_number(root: Path) -> None:
    data = prepared(root)
    assert data.sizes == {"train": 20, "validation": 5, "test": 6}
    for name in ("train", "validation", "test"):
        for row in data.split(name, confirm=True):
            source, number = row["index"].split("/")
            position = int(number) + (100 if source == "validation" else 0)
            text = ByT5Tokenizer().decode(row["input_ids"], skip_special_tokens=True)
            assert text == f"first {position}second {position}"
            assert row["gold"] == position % 2


def test_the_hubs_unlabelled_test_split_is_never_read(root: Path) -> None:
    (root / HUB / "default" / "test.parquet").write_bytes(b"not parquet")
    assert prepared(root).sizes["test"] == 6


def test_test_data_are_closed_to_the_search(root: Path) -> None:
    with pytest.raises(RuntimeError, match="confirm phase only"):
        prepared(root).split("test", confirm=False)


def test_preparing_twice_writes_once(root: Path) -> None:
    first = prepared(root)
    stamps = {path: path.stat().st_mtime_ns for path in first.path.iterdir()}
    assert prepared(root) == first
    assert {path: path.stat().st_mtime_ns for path in first.path.iterdir()} == stamps


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 16},
        {"limit": LimitConfig(train=8)},
        {"of": task(label={"words": ["yes", "no"]})},
    ],
)
def test_what_changes_the_rows_makes_new_data(root: Path, change: dict[str, Any]) -> None:
    assert prepared(root, **change).path != prepared(root).path


def test_a_changed_file_makes_new_data_and_a_new_hash(root: Path) -> None:
    before = prepared(root)
    write(root, "train", rows(20, start=1))
    after = prepared(root)
    assert after.path != before.path
    assert after.data_hash != before.data_hash


def test_the_data_hash_is_of_the_used_rows_only(root: Path, tmp_path: Path) -> None:
    before = prepared(root).data_hash
    write(root, "test", rows(9))  # never read
    for split in ("train", "validation"):  # rewritten: other times, same rows
        path = root / HUB / "default" / f"{split}.parquet"
        pq.write_table(pq.read_table(path), path, compression="gzip")
    assert prepared(root).data_hash == before


def test_leftovers_of_a_killed_process_are_removed(root: Path) -> None:
    folder = prepared(root).path
    left = folder.rename(folder.with_name(folder.name + ".tmp-1"))
    assert prepared(root).path == folder
    assert not left.exists()


def _prepare_in_process(root: Path, _: int) -> Prepared:
    return prepared(root)


def test_processes_that_prepare_at_once_share_one_result(root: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        results = pool.starmap(_prepare_in_process, [(root, i) for i in range(3)])
    assert results[0] == results[1] == results[2]
    assert len([path for path in results[0].path.parent.iterdir() if path.is_dir()]) == 1


# bad input


def test_a_data_root_without_the_data_set_says_where_it_looked_and_what_is_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "someone" / "others").mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"looked for .*someone/pairs/default/train\.parquet.* there is: others"
    ):
        prepared(tmp_path)


def as_csv(root: Path, *, keep: bool = False) -> None:
    """The same rows as CSV, in place of the parquet files or beside them."""
    for path in (root / HUB / "default").glob("*.parquet"):
        pacsv.write_csv(pq.read_table(path), path.with_suffix(".csv"))
        if not keep:
            path.unlink()


def test_csv_files_are_the_same_data_as_parquet_files(root: Path) -> None:
    expected = prepared(root).data_hash
    as_csv(root)
    assert prepared(root).data_hash == expected


@pytest.mark.parametrize("written", [["no", "yes"], [False, True]])
def test_labels_written_out_are_the_same_data_as_their_numbers(
    root: Path, written: list[Any]
) -> None:
    expected = prepared(root).data_hash
    for path in (root / HUB / "default").glob("*.parquet"):
        table = pq.read_table(path)
        words = [written[number] for number in table["label"].to_pylist()]
        pq.write_table(
            table.set_column(table.schema.get_field_index("label"), "label", pa.array(words)), path
        )
    assert prepared(root).data_hash == expected


@pytest.mark.parametrize("packed", ["dictionary", "string_view"])
def test_text_is_text_however_parquet_packs_it(packed: str, root: Path) -> None:
    expected = prepared(root).data_hash
    for path in (root / HUB / "default").glob("*.parquet"):
        table = pq.read_table(path)
        for place, name in enumerate(table.column_names):
            column = table[name]
            if name == "label":
                column = pa.chunked_array([["no" if n == 0 else "yes" for n in column.to_pylist()]])
            if packed == "dictionary":
                column = column.dictionary_encode()
            else:
                column = column.cast(pa.string_view())
            table = table.set_column(place, name, column)
        pq.write_table(table, path)
    assert prepared(root).data_hash == expected


def test_two_files_of_one_split_are_refused(root: Path) -> None:
    as_csv(root, keep=True)
    with pytest.raises(DataError, match=r"train\.csv are both there; keep one of them"):
        prepared(root)


def test_a_csv_file_that_is_none_is_named(root: Path) -> None:
    as_csv(root)
    (root / HUB / "default" / "train.csv").write_bytes(b"")
    with pytest.raises(DataError, match=r"train\.csv: not a readable csv file"):
        prepared(root)


def test_a_csv_column_that_is_there_twice_is_named(root: Path) -> None:
    as_csv(root)
    (root / HUB / "default" / "train.csv").write_text("a,b,b,label\nx,y,z,0\n")
    with pytest.raises(
        DataError, match=r"train\.csv: column 'b' is there 2 times; rename or remove"
    ):
        prepared(root)


def test_numbers_and_na_in_a_text_column_of_a_csv_file_are_text(root: Path) -> None:
    for split in ("train", "validation", "test"):
        write(root, split, {"a": ["007", "1.50", "NA"], "b": ["1", "", "null"], "label": [0, 1, 1]})
    expected = prepared(root).data_hash
    as_csv(root)
    assert prepared(root).data_hash == expected


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["true", "false"], ["true", "false", "true"]),
        (["true", "false"], [True, False, True]),
        (["True", "False"], [True, False, True]),
        (["1", "2"], ["1", "2", "1"]),
        (["2020-01-01", "2020-01-02"], ["2020-01-01", "2020-01-02", "2020-01-01"]),
        (["no", "yes"], [0, 1, 0]),
        (["no", "yes"], [False, True, False]),
        (["1", "2"], [0, 1, 0]),
    ],
)
def test_labels_of_a_csv_file_are_those_of_a_parquet_file(
    words: list[str], written: list[Any], root: Path
) -> None:
    for split in ("train", "validation", "test"):
        write(root, split, {**rows(3), "label": written})
    of = task(label={"words": words})
    expected = prepared(root, of)
    assert expected.split("train", confirm=False)["gold"] == [0, 1, 0]
    as_csv(root)
    assert prepared(root, of).data_hash == expected.data_hash


def test_a_label_that_stands_in_another_split_says_whether_labels_are_words(root: Path) -> None:
    of = task(label={"words": ["1", "2", "3"]})
    for labels, expected in (([0, 1, 2], [1, 2]), ([1, 2, 3], [0, 1])):
        write(root, "train", {**rows(2), "label": [1, 2]})
        write(root, "validation", {**rows(3), "label": labels})
        as_csv(root)
        assert prepared(root, of).split("train", confirm=False)["gold"] == expected


@pytest.mark.parametrize("names", [["007", "7", "07"], ["1.10", "1.1", "1"], [10, 20, 10]])
def test_groups_of_a_csv_file_are_those_of_a_parquet_file(names: list[Any], root: Path) -> None:
    for split in ("train", "validation", "test"):
        write(root, split, {**rows(3), "group": names})
    of = task(group=["group"])
    expected = prepared(root, of)
    as_csv(root)
    found = prepared(root, of)
    assert found.data_hash == expected.data_hash
    assert found.split("train", confirm=False)["group"] == [str(name) for name in names]


def test_rows_without_the_name_of_a_group_are_no_group_of_their_own(root: Path) -> None:
    for split in ("train", "validation", "test"):
        write(root, split, {**rows(3), "group": ["a", " ", "b"]})
    with pytest.raises(DataError, match=r"column 'group' names no group in row 1"):
        prepared(root, task(group=["group"]))


def test_groups_of_several_columns_are_told_apart_by_any_name(root: Path) -> None:
    for split in ("train", "validation", "test"):
        write(root, split, {**rows(3), "group": ["a/b", "a", "a"], "part": ["c", "b/c", "b"]})
    found = prepared(root, task(group=["group", "part"])).split("train", confirm=False)["group"]
    assert list(found) == ["a\\/b/c", "a/b\\/c", "a/b"]


def test_ids_of_a_csv_file_are_texts(root: Path) -> None:
    of = task(id="id")
    for split, names in (("train", ["01", "1"]), ("validation", ["2", "3"])):
        write(root, split, {**rows(2), "id": names})
    as_csv(root)
    found = prepared(root, of).split("train", confirm=False)["index"]
    assert list(found) == ["train/01", "train/1"]
    (root / HUB / "default" / "validation.csv").write_text("a,b,label,id\nx,y,0,1\nx,y,0,x\n")
    with pytest.raises(DataError, match=r"column 'id': '1' names row 1 of split 'train' and row 0"):
        prepared(root, of)


def test_a_csv_file_may_hold_a_long_document(root: Path) -> None:
    as_csv(root)
    (root / HUB / "default" / "train.csv").write_text(f"a,b,label\n{'x' * 3_000_000},y,0\nx,y,1\n")
    assert prepared(root).sizes["train"] == 2


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_csv_file_of_another_encoding_says_how_to_save_it(encoding: str, root: Path) -> None:
    as_csv(root)
    (root / HUB / "default" / "train.csv").write_text("a,b,label\ncafé,y,0\n", encoding=encoding)
    with pytest.raises(
        DataError, match=r"train\.csv: not all of it is UTF-8 text; save it as UTF-8"
    ):
        prepared(root)


@pytest.mark.parametrize("label", ["0,1", '"0'])
def test_a_row_that_is_cut_in_another_encoding_is_no_traceback(label: str, root: Path) -> None:
    as_csv(root)
    text = f'a,b,label\ncafé,y,0\n"x,y,{label}\n'
    (root / HUB / "default" / "train.csv").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=r"train\.csv: not all of it is UTF-8 text"):
        prepared(root)
    (root / HUB / "default" / "train.csv").write_text(text)
    with pytest.raises(DataError, match=r"train\.csv:3: the row that begins here opens a value"):
        prepared(root)


def test_a_missing_split_is_named(root: Path) -> None:
    (root / HUB / "default" / "validation.parquet").unlink()
    with pytest.raises(
        DataError, match=r"split 'validation'.*there is: test\.parquet, train\.parquet"
    ):
        prepared(root)


def test_a_missing_column_lists_the_columns_there_are(root: Path) -> None:
    write(root, "train", {"a": ["x"], "c": ["y"], "label": [0]})
    with pytest.raises(DataError, match=r"no column 'b'; the data have \['a', 'c', 'label'\]"):
        prepared(root)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("label", [0, 1, 2], r"label 2 in row 2, expected 0 to 1 for \['no', 'yes'\]"),
        ("label", [0, -1, 1], r"label -1 in row 1.*unlabelled split"),
        (
            "label",
            ["no", "yes", "Yes"],
            r"column 'label': label 'Yes' in row 2, expected one of label.words \['no', 'yes'\]",
        ),
        ("label", ["no", None, "yes"], r"column 'label' is null in row 1"),
        ("label", [0.0, 1.0, 0.5], r"got double .* expected whole numbers"),
        ("label", [0, None, 1], r"column 'label' is null in row 1"),
        ("b", ["x", "y", None], r"column 'b' is null in row 2"),
        ("b", [1, 2, 3], r"column 'b' holds int64, expected text"),
    ],
)
def test_a_bad_value_is_named_with_its_row(
    root: Path, column: str, values: list[Any], message: str
) -> None:
    write(root, "train", {**rows(3), column: values})
    with pytest.raises(DataError, match=message):
        prepared(root)


@pytest.mark.parametrize("wrong", [5.1, float("nan")])
def test_a_number_outside_the_range_is_refused(root: Path, wrong: float) -> None:
    scored = task(label={"range": [0.0, 5.0]}, metrics=["pearson"])
    write(root, "train", {**rows(3), "label": [0.0, wrong, 5.0]})
    with pytest.raises(DataError, match=rf"label {wrong} in row 1, expected 0 to 5"):
        prepared(root, scored)


def test_an_empty_split_is_refused(root: Path) -> None:
    pq.write_table(pa.table(rows(1)).slice(0, 0), root / HUB / "default" / "train.parquet")
    with pytest.raises(DataError, match="split 'train': the split is empty"):
        prepared(root)


@pytest.mark.parametrize("keep_frac", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(root: Path, keep_frac: float) -> None:
    path = root / HUB / "default" / "train.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep_frac * len(whole))])
    with pytest.raises(DataError, match=r"train\.parquet: not a readable parquet file"):
        prepared(root)


def test_a_damaged_page_is_named(root: Path) -> None:
    path = root / HUB / "default" / "train.parquet"
    whole = bytearray(path.read_bytes())
    whole[4:60] = b"\xff" * 56  # the footer is whole, the first column is not
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"train\.parquet: not a readable parquet file"):
        prepared(root)


@pytest.mark.parametrize("config", ["../pairs", "/etc"])
def test_paths_out_of_the_data_root_are_refused(root: Path, config: str) -> None:
    with pytest.raises(DataError, match="must name something inside the data root"):
        prepared(root, task(data={"hub": HUB, "config": config}))


@pytest.mark.parametrize("left", ["", '{"sizes": {', "{}", "[" * 200_000, None])
def test_prepared_data_that_were_cut_say_how_they_are_made_anew(
    left: str | None, root: Path
) -> None:
    manifest = prepared(root).path / "prepared.json"
    manifest.unlink()
    if left is not None:
        manifest.write_text(left)
    with pytest.raises(DataError, match=r"prepared\.json: cannot be read: .*remove the folder"):
        prepared(root)
    shutil.rmtree(manifest.parent)
    assert prepared(root).sizes


def test_an_unreachable_hub_is_reported_at_once_and_names_the_data_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"
    )  # nothing listens on the discard port
    of = task()
    with pytest.raises(
        DataError,
        match=r"someone/pairs \(default\) on the hub: the hub cannot be reached or refuses .*--data-root DIR",
    ):
        prepare(of, objective(of), limit=LimitConfig(), data_root=None, cache=tmp_path)
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"generator": "entailmen"}, ConfigError, "did you mean entailment"),
        ({"generator": "entailment", "options": {"tran": 8}}, ConfigError, "tran"),
        (
            {"generator": "entailment", "options": {"test": 8_000, "denied_frac": 0.0}},
            ConfigError,
            "ask for fewer",
        ),
        ({"generator": "entailment", "options": {"train": 7}}, ConfigError, "multiple of 4"),
    ],
)
def test_bad_generator_settings_are_refused(
    tmp_path: Path, data: dict[str, Any], error: type[Exception], message: str
) -> None:
    named = {"rule": "named", "test": "test"}
    with pytest.raises(error, match=message):
        prepared(tmp_path, task(data=data, splits=named))


def test_a_generator_has_no_other_splits(tmp_path: Path) -> None:
    named = {"rule": "named", "test": "validation_matched"}
    with pytest.raises(
        DataError, match="no split 'validation_matched'; a generator makes train, validation, test"
    ):
        prepared(tmp_path, task(data={"generator": "entailment"}, splits=named))
