"""Files of one's own as tasks: what is found in them, what is refused, and with which words."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from suite.config.sweep import LimitConfig
from suite.config.task import FileData, LabelTask, TaskConfig, load_task, load_task_file
from suite.data.inspection import TaskRows, inspect_rows
from suite.data.prepare import read_splits, split_rows
from suite.data.source import open_source
from suite.errors import ConfigError, DataError
from suite.record.spec import TrialSpec
from suite.tables import read_table
from tests.commands import Suite, suite
from tests.trained import trained_spec

__all__ = ["suite"]
ROWS = [{"text": f"text {n}, so", "label": ("bad", "good")[n % 2]} for n in range(60)]
TASK = {
    "description": "d",
    "source": "s",
    "inputs": ["text"],
    "text_to_text": "say: {text}",
    "label": {"column": "label"},
    "metrics": ["accuracy"],
}
Write = Callable[..., Path]


def csv_text(rows: list[dict[str, Any]] = ROWS, delimiter: str = ",") -> str:
    lines = [delimiter.join(rows[0])]
    for row in rows:
        lines.append(delimiter.join(f'"{value}"' for value in row.values()))
    return "\n".join(lines) + "\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a task as JSON, which is YAML too, beside its data; the path of the task."""
    monkeypatch.chdir(tmp_path)

    def call(data: dict[str, Any], **changes: Any) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(json.dumps({**TASK, "data": data, **changes}))
        return path

    return call


def labels_of(task: TaskConfig) -> list[Any]:
    """The labels of the file of training rows, as a trial reads them."""
    assert isinstance(task, LabelTask)
    return read_splits(task, open_source(task, None))["train"][task.label.column].to_pylist()


def pack(path: Path, content: bytes) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(path.stem, content)
        return
    packers = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    path.write_bytes(packers.get(path.suffix, lambda plain: plain)(content))


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz", ".zip"])
@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_rows_are_the_same_in_every_form(form: str, packed: str, write: Write) -> None:
    path = Path(f"rows.{form}{packed}")
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), "plain.parquet")
        content = Path("plain.parquet").read_bytes()
    elif form == "json":
        content = json.dumps(ROWS).encode()
    elif form == "jsonl":
        content = "\n".join(map(json.dumps, ROWS)).encode()
    else:
        content = csv_text(delimiter="," if form == "csv" else "\t").encode()
    pack(path, content)
    task = load_task_file(write({"files": str(path)}))
    assert isinstance(task, LabelTask) and task.label.words == ["bad", "good"]
    assert labels_of(task) == [0, 1] * 30
    assert read_splits(task, open_source(task, None))["train"]["text"].to_pylist() == [
        row["text"] for row in ROWS
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_delimiter_and_encoding_are_found(delimiter: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [{"text": f"é, so; {n}\nmore | and\tmore", "label": n} for n in range(3)]
    path.write_bytes(csv_text(rows, delimiter).encode(encoding))
    table = read_table(path)
    assert [*table.columns] == ["text", "label"]
    assert table.columns["text"].to_pylist() == [row["text"] for row in rows]
    assert table.columns["label"].to_pylist() == ["0", "1", "2"]
    assert table.place(2) == f"{path}:6", "a row of two lines begins at its first"


def test_another_encoding_is_named_by_its_line_and_can_be_given(write: Write) -> None:
    # a carriage return within a value ends no line
    rows = [*ROWS[:-1], {"text": "one\rtwo", "label": "good"}, {"text": "café", "label": "good"}]
    Path("rows.csv").write_bytes(csv_text(rows).encode("cp1252"))
    with pytest.raises(DataError, match=r"rows\.csv:62: not utf-8.*cp1252.*café"):
        load_task_file(write({"files": "rows.csv"}))
    task = load_task_file(write({"files": "rows.csv", "encoding": "cp1252"}))
    assert len(labels_of(task)) == 61
    with pytest.raises(ConfigError, match=r"mine\.yaml.*encoding: 'utf-9' is no encoding"):
        load_task_file(write({"files": "rows.csv", "encoding": "utf-9"}))


@pytest.mark.parametrize("encoding", [None, "utf-8", "utf-8-sig", "utf-16-le"])
def test_the_mark_of_an_encoding_is_no_part_of_a_name(encoding: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("\ufefftext,label\n007,1\nNA,0\n".encode(encoding or "utf-8"))
    if encoding == "utf-8-sig":
        path.write_bytes("text,label\n007,1\nNA,0\n".encode(encoding))
    table = read_table(path, encoding=encoding)
    assert table.columns["text"].to_pylist() == ["007", "NA"]


def test_a_row_may_be_longer_than_a_block_of_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    document = "line\n" * 600_000
    path.write_text(csv_text([{"text": "short", "label": 0}, {"text": document, "label": 1}]))
    assert read_table(path).columns["text"].to_pylist() == ["short", document]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text,label\nfine,good\na, b,bad\nc,good\n", r"rows\.csv:3: 3 values, expected 2"),
        ('text,label\n"two\nlines",good\nx\n', r"rows\.csv:4: 1 values, expected 2"),
        ("text,text,label\na,b,good\n", r"rows\.csv:1: column 'text' is there 2 times"),
        ("", r"rows\.csv: is empty; expected a first line with the names"),
        ("text,label\na,good\nb,\n", r"rows\.csv:3: no label in column 'label'"),
        ("text,klass\na,good\nb,bad\n", r"unknown column 'label'; known: klass, text"),
        ('text,label\na,x\n"b,y\nc,x\n"d,y\n', r"rows\.csv:3: the row that begins here opens"),
        ('text,label\na,x\n"b\nc",y\nd,"x\n', r"rows\.csv:5: the row .*unexpected end of data"),
        ('text,label\na,x\n"b,y\n', r"rows\.csv:3: the row .*unexpected end of data"),
        ('text,label\n"he said \\"hi\\" 0",x\n', r"rows\.csv:2: the row that begins here"),
    ],
)
def test_a_bad_row_is_named_by_its_line(content: str, said: str, write: Write) -> None:
    Path("rows.csv").write_text(content)
    with pytest.raises((DataError, ConfigError), match=said):
        load_task_file(write({"files": "rows.csv"}))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"text": "a", "label": "x"}', '{"text": "b"'], r"rows\.jsonl:2: not JSON: .*one object"),
        (['{"text": "a", "text": "b"}'], r"rows\.jsonl:1: not JSON: the key 'text' is there 2"),
        (['{"text": "a", "label": "x"}', "7"], r"rows\.jsonl:2: got 7, expected an object"),
        (['{"text": "a", "label": "x"}', '{"text": "b"}'], r"rows\.jsonl:2: no label"),
        (["[" * 100_000], r"rows\.jsonl: not JSON: its brackets are nested too deep in '\[\[.*"),
        (['{"text": ' + "7" * 5_000 + "}"], r"rows\.jsonl:1: not JSON: .*5000 digits"),
        (['{"text": "\\ud800", "label": "x"}'], r"rows\.jsonl:1: holds half a .*'\\ud800'"),
        (['{"text": ["\\uDC00"], "label": "x"}'], r"rows\.jsonl:1: holds half a character"),
        (['{"text": "a", "label": ["x", "y"]}'], r"rows\.jsonl:1: .*a task for each column"),
        (['{"text": {"0": "a"}, "label": {"0": "x"}}'], r'one object of columns.*orient="records"'),
    ],
)
def test_a_bad_line_of_json_is_named(lines: list[str], said: str, write: Write) -> None:
    Path("rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=said):
        load_task_file(write({"files": "rows.jsonl"}))


def test_a_packed_file_that_was_damaged_is_named(write: Write) -> None:
    data = bytearray(gzip.compress(b"a,b\n1,2\n" * 50))
    data[20] ^= 255
    Path("rows.csv.gz").write_bytes(data)
    with zipfile.ZipFile("rows.csv.zip", "w") as archive:
        archive.writestr("rows.csv", "text,label\na,x\n")
    data = bytearray(Path("rows.csv.zip").read_bytes())
    # The bit of a password, at the head of the file and in the list of files at its end.
    data[6] |= 1
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    Path("rows.csv.zip").write_bytes(data)
    for name in ("rows.csv.gz", "rows.csv.zip"):
        with pytest.raises(DataError, match=f"{name}: cannot be read: .*copy it again"):
            load_task_file(write({"files": name}))


@pytest.mark.parametrize(
    ("values", "words", "numbers"),
    [
        (["5", "1", "10", "1"], ["1", "5", "10"], [1, 0, 2, 0]),
        ([5, 1, 10, 1], ["1", "5", "10"], [1, 0, 2, 0]),
        ([5.0, 1.0, 10.0, 1.0], ["1", "5", "10"], [1, 0, 2, 0]),
        ([True, False, True, False], ["false", "true"], [1, 0, 1, 0]),
        (["yes", "no", "no", "yes"], ["no", "yes"], [1, 0, 0, 1]),
        (["5.0", "1.0", "10.0", "1.0"], ["1.0", "5.0", "10.0"], [1, 0, 2, 0]),
        (["1_2", "3_4", "1_2", "3_4"], ["1_2", "3_4"], [0, 1, 0, 1]),
    ],
)
def test_labels_need_no_list_and_are_sorted(
    values: list[Any], words: list[str], numbers: list[int], write: Write
) -> None:
    lines = [json.dumps({"text": "t", "label": value}) for value in values * 5]
    Path("rows.jsonl").write_text("\n".join(lines))
    task = load_task_file(write({"files": "rows.jsonl"}))
    assert isinstance(task, LabelTask) and task.label.words == words
    assert labels_of(task) == numbers * 5


def test_words_that_are_given_may_be_meant_by_position(write: Write) -> None:
    Path("rows.csv").write_text(csv_text([{"text": "t", "label": n % 2} for n in range(10)]))
    task = load_task_file(write({"files": "rows.csv"}, label={"words": ["bad", "good"]}))
    assert labels_of(task) == [0, 1] * 5


@pytest.mark.parametrize("words", [["true", "false"], ["True", "False"]])
def test_true_is_the_first_class_where_the_words_say_so(words: list[str], write: Write) -> None:
    lines = [json.dumps({"text": "t", "label": value}) for value in [True, False] * 5]
    Path("rows.jsonl").write_text("\n".join(lines))
    task = load_task_file(write({"files": "rows.jsonl"}, label={"words": words}))
    assert labels_of(task) == [0, 1] * 5


def test_positions_and_words_are_told_apart_by_all_files(write: Write) -> None:
    for split, numbers in (("train", [0, 1, 2, 3]), ("validation", [1, 2, 3, 3])):
        rows = [{"text": f"{split} {n}", "label": number} for n, number in enumerate(numbers)]
        Path(f"{split}.csv").write_text(csv_text(rows))
    files = {"train": "train.csv", "validation": "validation.csv"}
    task = load_task_file(write(files, label={"words": ["1", "2", "3", "4"]}))
    splits = read_splits(task, open_source(task, None))
    assert {split: table["label"].to_pylist() for split, table in splits.items()} == {
        "train": [0, 1, 2, 3],
        "validation": [1, 2, 3, 3],
    }


def test_a_number_that_is_no_word_is_named_and_not_another(write: Write) -> None:
    for split, labels in (("train", ["1", "5"]), ("validation", ["2", "0"])):
        rows = [{"text": f"{split} {n}", "label": label} for n, label in enumerate(labels)]
        Path(f"{split}.csv").write_text(csv_text(rows))
    files = {"train": "train.csv", "validation": "validation.csv"}
    task = load_task_file(write(files, label={"words": ["1", "2", "3", "4", "5"]}))
    with pytest.raises(DataError, match=r"validation\.csv:3: column 'label' holds '0', expected"):
        labels_of(task)


def test_a_number_that_a_table_wrote_with_a_point_is_the_word_that_it_equals(write: Write) -> None:
    """And not a position: 1.0 would be the word "2"."""
    rows = [{"text": f"t{n}", "label": f"{1 + n % 2}.0"} for n in range(10)]
    Path("rows.csv").write_text(csv_text(rows))
    task = load_task_file(write({"files": "rows.csv"}, label={"words": ["1", "2", "3"]}))
    assert labels_of(task) == [0, 1] * 5


@pytest.mark.parametrize("labels", [("0.0", "1.0"), ("False", "True"), ("FALSE", "TRUE")])
def test_positions_are_read_as_tables_write_them(labels: tuple[str, str], write: Write) -> None:
    rows = [{"text": f"t{n}", "label": labels[n % 2]} for n in range(10)]
    Path("rows.csv").write_text(csv_text(rows))
    task = load_task_file(write({"files": "rows.csv"}, label={"words": ["neg", "pos"]}))
    assert labels_of(task) == [0, 1] * 5


def test_a_label_may_lie_inside_of_a_column(write: Write) -> None:
    rows = [{"text": f"t{n}", "meta": {"label": ("bad", "good")[n % 2]}} for n in range(10)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"label": "meta.label"}
    task = load_task_file(write({"files": "rows.jsonl", "columns": columns}))
    assert {*labels_of(task)} == {0, 1}
    columns = {"label": "meta.lable"}
    with pytest.raises(DataError, match=r"column 'meta' \(struct<.*>\) holds no lable"):
        load_task_file(write({"files": "rows.jsonl", "columns": columns}))


def test_a_row_in_two_files_is_found_in_whatever_form(write: Write) -> None:
    rows = [{"id": n, **row} for n, row in enumerate(ROWS)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("validation.csv").write_text(csv_text(rows[-9:]))
    files = {"train": "train.jsonl", "validation": "validation.csv"}
    task = load_task_file(write(files, id="id"))
    with pytest.raises(DataError, match=r"'51' names row 51 of split 'train' and row 0 of split"):
        TaskRows.read(task, None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"files": ""}, "'': expected a file that ends in"),
        ({"files": "rows.csv", "delimiter": "§"}, "'§': expected one ASCII character"),
        ({"files": "rows.csv", "delimiter": '"'}, "expected one ASCII character, no quote"),
        ({"files": "rows.csv", "encoding": "base64"}, "'base64' is no encoding that Python"),
        ({"files": "rows.csv", "encoding": "undefined"}, "'undefined' is no encoding that Python"),
    ],
)
def test_what_no_file_can_be_read_with_is_refused(
    data: dict[str, str], said: str, write: Write
) -> None:
    Path("rows.csv").write_text(csv_text())
    with pytest.raises(ConfigError, match=said):
        load_task_file(write(data))


def test_yes_and_no_without_quotes_are_explained(write: Write) -> None:
    Path("rows.csv").write_text(csv_text())
    path = write({"files": "rows.csv"}, label={"words": [False, True]})
    with pytest.raises(ConfigError, match=r"label\.words\.0: got False.*bare yes, no.*quote them"):
        load_task_file(path)


def test_several_label_columns_are_refused(write: Write) -> None:
    Path("rows.csv").write_text(csv_text())
    with pytest.raises(ConfigError, match=r"label\.column: got 2 columns.*a task for each column"):
        load_task_file(
            write({"files": "rows.csv"}, label={"column": ["a", "b"], "words": ["x", "y"]})
        )


def test_numbers_are_learnt_as_numbers_and_a_text_among_them_is_named(write: Write) -> None:
    rows = [{"text": f"t{n}", "label": n / 4} for n in range(40)]
    Path("rows.csv").write_text(csv_text(rows))
    with pytest.raises(ConfigError, match=r"40 different values .*write range: \[low, high\]"):
        load_task_file(write({"files": "rows.csv"}))
    label = {"range": [0.0, 10.0]}
    given = {"label": label, "metrics": ["pearson"]}
    assert labels_of(load_task_file(write({"files": "rows.csv"}, **given))) == [
        row["label"] for row in rows
    ]
    Path("rows.csv").write_text(csv_text([*rows, {"text": "t", "label": "n/a"}]))
    with pytest.raises(DataError, match=r"rows\.csv:42: .*the text 'n/a', expected a number"):
        labels_of(load_task_file(write({"files": "rows.csv"}, **given)))
    with pytest.raises(DataError, match=r"rows\.csv:42: .*'n/a', a text that is not a number"):
        load_task_file(write({"files": "rows.csv"}))


def test_whole_numbers_in_two_spellings_are_numbers(write: Write) -> None:
    rows = [{"text": "t", "label": ("1", "1.0", "2")[n % 3]} for n in range(30)]
    Path("rows.csv").write_text(csv_text(rows))
    with pytest.raises(ConfigError, match=r"3 different values .*write range: \[low, high\]"):
        load_task_file(write({"files": "rows.csv"}))


@pytest.mark.parametrize("gap", ["", "  ", None, float("nan")])
@pytest.mark.parametrize("label", ["bad", 1.0])
def test_a_row_without_a_label_is_named(label: Any, gap: Any, write: Write) -> None:
    rows = [{"text": "t", "label": label}] * 60 + [{"text": "t", "label": gap}]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"rows\.jsonl:61: no label in column 'label'"):
        load_task_file(write({"files": "rows.jsonl"}))


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (["files"], (36, 12, 12)),
        (["train", "test"], (48, 12, 60)),
        (["train", "validation"], (60, 30, 30)),
        (["train", "validation", "test"], (60, 60, 60)),
    ],
)
def test_splits_that_are_missing_are_drawn(
    names: list[str], sizes: tuple[int, ...], write: Write
) -> None:
    for name in names:
        Path(f"{name}.csv").write_text(csv_text())
    task = load_task_file(write({name: f"{name}.csv" for name in names}))
    parts = split_rows(task, read_splits(task, open_source(task, None)), LimitConfig(), where="")
    assert tuple(len(part.rows) for part in parts.values()) == sizes


def test_a_rule_that_is_given_reads_every_file_or_names_it(write: Write) -> None:
    for name in ("train", "validation", "test"):
        Path(f"{name}.csv").write_text(csv_text())
    both = {"train": "train.csv", "test": "test.csv"}
    rule = {"rule": "held-out", "held_out": 12}
    task = load_task_file(write(both, splits=rule))
    parts = split_rows(task, read_splits(task, open_source(task, None)), LimitConfig(), where="")
    assert [len(part.rows) for part in parts.values()] == [48, 12, 60]
    three = both | {"validation": "validation.csv"}
    for given, unread in ((rule, "validation"), ({"rule": "read"}, "test")):
        unread_file = rf"no row of data\.{unread} \({unread}\.csv\); leave the rule out"
        with pytest.raises(ConfigError, match=unread_file):
            load_task_file(write(three, splits=given))
    with pytest.raises(ConfigError, match=r"leave splits\.test out, or the file"):
        load_task_file(write(both, splits=rule | {"test": None}))


def test_changed_data_are_another_trial_and_moved_data_are_not(
    write: Write, tmp_path: Path
) -> None:
    Path("rows.csv").write_text(csv_text())

    def spec(task: TaskConfig) -> TrialSpec:
        return trained_spec("lora", "bert").model_copy(update={"task": task})

    task = load_task_file(write({"files": "rows.csv"}))
    first = spec(task).hash
    again = TrialSpec.model_validate_json(spec(task).model_dump_json())
    assert again.hash == first and isinstance(again.task.data, FileData)
    assert again.task.data.folder == str(tmp_path)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "rows.csv").write_text(csv_text())
    (moved / "mine.yaml").write_text(Path("mine.yaml").read_text())
    assert spec(load_task_file(moved / "mine.yaml")).hash == first
    Path("rows.csv").write_text(csv_text([*ROWS, ROWS[0]]))
    with pytest.raises(DataError, match=r"rows\.csv: has changed since the task was read"):
        labels_of(task)
    assert spec(load_task_file(tmp_path / "mine.yaml")).hash != first


def test_an_absent_file_says_where_it_was_looked_for(write: Write, tmp_path: Path) -> None:
    (tmp_path / "others.csv").write_text("")
    with pytest.raises(DataError, match=rf"no file rows\.csv; looked in {tmp_path}.*others\.csv"):
        load_task_file(write({"files": "rows.csv"}))


def test_a_whole_path_is_said_to_lie_where_it_lies(write: Write, tmp_path: Path) -> None:
    files = tmp_path / "files"
    with pytest.raises(DataError, match=rf"no file {files}/no\.csv; looked in {files}; .*: none$"):
        load_task_file(write({"files": str(files / "no.csv")}))
    files.mkdir()
    (files / "rows.csv").write_text(csv_text())
    task = load_task_file(write({"files": str(files / "rows.csv")}))
    assert open_source(task, None).where == str(files / "rows.csv")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{files: rows.csv,\n delimiter: ab}", "2: data.delimiter: String should have at most"),
        ("{files: rows.csv,\n delimitr: a}", "2: data: unknown key 'delimitr'; did you mean"),
        ("{files: rows.csv, train: rows.csv}", "1: data: give files "),
        (
            "{generator: any,\n opts: {}}",
            "2: data: unknown key 'opts'; did you mean options",
        ),
        (
            "rows.csv",
            r"1: data: got 'rows\.csv', expected keys and values: \{files: FILE\} for [^\n]*$",
        ),
    ],
)
def test_a_mistake_in_data_is_told_with_line_and_key(
    data: str, said: str, write: Write, tmp_path: Path
) -> None:
    Path("rows.csv").write_text(csv_text())
    path = tmp_path / "lines.yaml"
    rest = "".join(f"{key}: {json.dumps(value)}\n" for key, value in TASK.items())
    path.write_text(f"data: {data}\n{rest}")
    with pytest.raises(ConfigError, match=rf"^{path}:{said}"):
        load_task_file(path)


@pytest.mark.parametrize("name", ["rows.csv", "./rows", "a/b/c", "/data/rows", "rows.jsonl.gz"])
def test_a_path_is_never_looked_up_on_the_hub(name: str, write: Write) -> None:
    with pytest.raises(ConfigError, match=r"data\.hub: .*is a path.*in data: \{files: FILE\}"):
        load_task_file(write({"hub": name}, label={"words": ["a", "b"]}))


def test_a_folder_is_never_looked_up_on_the_hub(write: Write) -> None:
    Path("my/rows").mkdir(parents=True)
    task = load_task_file(write({"hub": "my/rows"}, label={"words": ["a", "b"]}))
    with pytest.raises(DataError, match=r"is a folder here .*give --data-root \."):
        open_source(task, None)


def test_an_unknown_task_says_which_folders_were_searched(tmp_path: Path, write: Write) -> None:
    (tmp_path / "tasks").mkdir()
    with pytest.raises(ConfigError, match=rf"looked in {tmp_path}/tasks.*init --data rows\.csv"):
        load_task("rows.csv")


# suite init --data


def test_init_writes_a_task_and_a_sweep_that_can_be_run(suite: Suite, write: Write) -> None:
    Path("my rows.csv").write_text(csv_text(delimiter=";"))
    code, out, err = suite(
        "init", "s.yaml", "--data", "my rows.csv", "--text", "text", "--label", "label"
    )
    assert (code, err) == (0, "") and "60 rows: 30 bad, 30 good" in out
    task = load_task("my-rows")
    assert isinstance(task, LabelTask) and task.label.words == ["bad", "good"]
    facts, findings = inspect_rows(TaskRows.read(task, None))
    assert [fact.rows for fact in facts] == [36, 12, 12]
    assert all(finding.level != "fail" for finding in findings)
    dry = ("run", "s.yaml", "--dry-run", "--set", "training.batch_size=16")
    code, out, err = suite(*dry)
    # 30 trials and nine of the edge guard, of eight steps each.
    assert (code, err) == (0, "") and "steps      312 " in out
    code, _, err = suite(*dry, "--set", "limit.train=8")
    assert code == 2 and "only 8 training rows; use a smaller batch_size" in err
    code, _, err = suite("run", "quickstart", "--dry-run", "--set", "limit.train=8")
    assert code == 2 and "only 8 training rows; use a smaller batch_size" in err
    Path("heading.csv").write_text("text,label\n")
    given = ("--data", "heading.csv", "--text", "text", "--label", "label", "--yes")
    code, _, err = suite("init", "none.yaml", *given)
    assert code == 2 and "heading.csv: no rows" in err
    Path("my rows.csv").write_text(csv_text([*ROWS, {"text": "", "label": "ugly"}], ";"))
    code, _, err = suite(*dry)
    assert code == 2 and "label 'ugly' in row 60, expected one of" in err
    assert not Path("runs").exists(), "a dry run leaves no trace"


def test_init_makes_a_task_of_numbers_and_of_odd_names(suite: Suite, write: Write) -> None:
    rows = [{"the text": f"t{n}", "a.b": n / 8} for n in range(60)]
    Path("train.csv").write_text(csv_text(rows))
    Path("last.csv").write_text(csv_text(rows))
    given = ("--data", "train=train.csv", "--data", "test=last.csv")
    code, _, err = suite("init", *given, "--text", "the text", "--label", "a.b")
    assert (code, err) == (0, "")
    task = load_task("train")
    assert isinstance(task, LabelTask) and task.label.range == [0.0, 7.375]
    assert task.label.step == 0.1 and task.text_to_text == "a_b of the_text: {the_text}"
    assert labels_of(task) == [row["a.b"] for row in rows]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--text", "text"), "--label: expected one of the columns of rows.csv: text, label"),
        (("--text", "txt", "--label", "label"), "unknown column 'txt'; did you mean text?"),
        (("--text", "text", "--label", "label,text"), "a task asks for one label; make a task for"),
        (("--text", "text", "--label", "text"), "the answer must not be read"),
        (("--data", "more.csv", "--label", "label"), "expected one file with all rows, or train="),
    ],
)
def test_init_says_what_it_needs_of_a_file(
    options: tuple[str, ...], said: str, suite: Suite, write: Write
) -> None:
    Path("rows.csv").write_text(csv_text())
    code, _, err = suite("init", "--data", "rows.csv", *options)
    assert code == 2 and said in err
    assert [path.name for path in Path.cwd().iterdir()] == ["rows.csv"]


def test_init_refuses_numbers_that_are_all_the_same(suite: Suite, write: Write) -> None:
    rows = [{"text": "t", "label": ("1.5", "1.50")[n % 2]} for n in range(30)]
    Path("rows.csv").write_text(csv_text(rows))
    code, _, err = suite("init", "--data", "rows.csv", "--text", "text", "--label", "label")
    assert code == 2 and "every row has '1.5', so there is nothing to learn" in err


def test_init_says_which_splits_a_file_can_be_of(suite: Suite, write: Write) -> None:
    Path("rows.csv").write_text(csv_text())
    code, _, err = suite("init", "--data", "tran=rows.csv", "--text", "text", "--label", "label")
    assert code == 2 and "--data tran=rows.csv: no such file" in err
    assert "before = stands one of train, validation, test" in err


def test_init_reads_the_file_that_was_named(
    suite: Suite, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "inner"
    for folder, text in ((tmp_path, "right"), (inner, "wrong")):
        (folder / "data").mkdir(parents=True)
        rows = [{"text": f"{text} {n}", "label": n % 2} for n in range(50)]
        (folder / "data/rows.csv").write_text(csv_text(rows))
    # a task in inner/tasks would find inner/data by the same name
    monkeypatch.chdir(inner)
    given = ("--data", "../data/rows.csv", "--text", "text", "--label", "label")
    assert suite("init", *given)[0] == 0
    task = load_task_file(Path("tasks/rows.yaml"))
    texts = read_splits(task, open_source(task, None))["train"]["text"].to_pylist()
    assert texts[0].startswith("right")


def test_init_makes_a_range_of_numbers_of_any_size(suite: Suite, write: Write) -> None:
    rows = [{"text": f"t{n}", "label": (n - 20) * 7.5e306} for n in range(40)]
    Path("mean.csv").write_text(csv_text(rows))
    given = ("--data", "mean.csv", "--text", "text", "--label", "label")
    assert suite("init", *given)[0] == 0
    # no task may have the name of the mean over tasks
    assert "range: [-1.5e+308, 1.42" in Path("tasks/own-mean.yaml").read_text()


def test_init_never_hides_a_shipped_task_nor_overwrites_one(suite: Suite, write: Write) -> None:
    Path("sst2.csv").write_text(csv_text())
    command = ("init", "--data", "sst2.csv", "--text", "text", "--label", "label")
    assert suite(*command)[0] == 0
    assert Path("tasks/own-sst2.yaml").is_file()
    Path("my-sweep.yaml").unlink()
    code, _, err = suite(*command)
    assert code == 2 and "tasks/own-sst2.yaml: is there already; --force" in err
    code, _, err = suite("init", "--yes", "--label", "label")
    assert code == 2 and "give --data FILE" in err
