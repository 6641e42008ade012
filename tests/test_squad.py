"""Questions on a context: the official counts, windows, spans, and what no window may answer."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    BertConfig,
    ByT5Tokenizer,
    PreTrainedTokenizerBase,
)

from suite.config.sweep import LimitConfig
from suite.config.task import QuestionAnsweringTask, load_task
from suite.config.training import TrainingConfig
from suite.data.context_windows import Windows
from suite.data.make_objective import make_objective
from suite.data.prepare import prepare
from suite.data.question_answering import SpanObjective, best_spans
from suite.errors import DataError, IncompatibleError
from suite.metrics.squad import exact_match, normalise, score_spans, token_f1
from tests.rows import task_row, write_rows
from tests.toy import learn

CONTEXT = "The Amazon is the longest river. It is 6,400 km long; the Nile is said to be 6,650 km."
BERT = BertConfig(
    vocab_size=384, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2
)


def word_pieces() -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = [
        "[PAD]",
        "[CLS]",
        "[SEP]",
        "[UNK]",
        "a",
        "b",
        "the",
        "amazon",
        "is",
        "longest",
        "river",
        "what",
    ]
    backend = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_input_names=names
    )


TOKENIZERS = [pytest.param(ByT5Tokenizer(), id="bytes"), pytest.param(word_pieces(), id="fast")]


def goal(
    name: str = "squad", tokenizer: PreTrainedTokenizerBase | None = None, **training: Any
) -> SpanObjective:
    settings = TrainingConfig(
        **{"max_length": 64, "stride": 10, "target_max_length": 12, **training}
    )
    made = make_objective(
        load_task(name),
        kind="encoder",
        tokenizer=tokenizer or ByT5Tokenizer(),
        training=settings,
        decoder_objective="head",
    )
    assert isinstance(made, SpanObjective)
    return made


def question(
    answers: list[str], context: str = CONTEXT, asked: str = "what is longest"
) -> dict[str, list[Any]]:
    starts = [context.index(answer) for answer in answers]
    return {"question": [asked], "context": [context], "texts": [answers], "starts": [starts]}


def windows_of(made: SpanObjective, columns: dict[str, list[Any]]) -> Dataset:
    found = made.encode(columns)
    return Dataset.from_dict({**found, "index": [f"validation/{n}" for n in found["index"]]})


# the official counts


@pytest.mark.parametrize(
    ("answer", "gold", "em", "f1"),
    [
        ("the Amazon!", "Amazon", 1.0, 1.0),  # articles, case and punctuation do not count
        ("Amazon river", "The Amazon", 0.0, 2 / 3),  # precision 1/2, recall 1
        ("6,650 km", "6650 km", 1.0, 1.0),
        ("km km km", "km", 0.0, 0.5),  # a repeated word counts as often as it stands in both
        ("Nile", "Amazon", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("", "Amazon", 0.0, 0.0),
        ("Amazon", "", 0.0, 0.0),
        ("the", "", 1.0, 1.0),  # nothing is left of it
        ("theatre", "atre", 0.0, 0.0),  # an article is a word, not a syllable
        ("well-known", "wellknown", 1.0, 1.0),  # punctuation is taken out, not replaced
    ],
)
def test_an_answer_counts_as_in_the_official_evaluation(
    answer: str, gold: str, em: float, f1: float
) -> None:
    assert (exact_match(answer, gold), token_f1(answer, gold)) == (em, pytest.approx(f1))


def test_the_best_of_the_accepted_answers_counts_in_percent() -> None:
    golds = [["Amazon", "the Amazon river"], ["6,650 km"], [""]]
    answers = ["amazon river", "6,650 miles", ""]
    assert score_spans(["em", "token_f1"], answers, golds) == {
        "em": pytest.approx(200 / 3),
        "token_f1": pytest.approx(250 / 3),
    }


def test_where_there_is_no_answer_only_silence_is_right() -> None:
    assert score_spans(["em", "token_f1"], ["something"], [[""]]) == {"em": 0.0, "token_f1": 0.0}
    assert score_spans(["em"], [""], [[]]) == {"em": 100.0}
    assert score_spans(["em"], [""], [["the", "Amazon"]]) == {"em": 0.0}, (
        "an accepted text without words is none, as officially"
    )


def test_f1_is_what_counters_of_words_give() -> None:
    answer = "b a c a c a d"
    gold = "c c d d e a"
    given = normalise(answer)
    wanted = normalise(gold)
    same = sum((Counter(given) & Counter(wanted)).values())
    precision = same / len(given)
    recall = same / len(wanted)
    assert token_f1(answer, gold) == pytest.approx(2 * precision * recall / (precision + recall))


def test_no_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="0 answers for 0 questions"):
        score_spans(["em"], [], [])


# windows


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("asked", ["what is longest", "what " * 40])
def test_windows_cover_the_context_overlap_and_never_exceed_the_length(
    tokenizer: PreTrainedTokenizerBase, asked: str
) -> None:
    cutter = Windows(tokenizer, at_most=20, stride=3, where="t")
    (windows,) = cutter.cut([asked], [CONTEXT])
    assert len(windows) > 1 and all(len(window.input_ids) <= 20 for window in windows)
    spans = [span for window in windows for span in window.offsets]
    assert {n for low, high in spans for n in range(low, high)} >= {
        n for n, c in enumerate(CONTEXT) if not c.isspace()
    }
    for before, after in pairwise(windows):
        assert before.offsets[3] == after.offsets[0]
    assert windows[-1].offsets[-1][1] == len(CONTEXT)


def test_a_window_is_what_the_tokenizer_makes_of_the_pair() -> None:
    for tokenizer in (ByT5Tokenizer(), word_pieces()):
        (windows,) = Windows(tokenizer, at_most=300, stride=3, where="t").cut(
            ["what is"], [CONTEXT]
        )
        pair = tokenizer("what is", CONTEXT)
        assert [window.input_ids for window in windows] == [pair["input_ids"]]
        assert windows[0].token_type_ids == pair.get("token_type_ids")


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_an_answer_is_found_again_by_its_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    (windows,) = Windows(tokenizer, at_most=20, stride=3, where="t").cut(["what"], [CONTEXT])
    low = CONTEXT.index("longest")
    places = [(window, window.place((low, low + 7))) for window in windows]
    inside = [(window, place) for window, place in places if place != (0, 0)]
    assert 0 < len(inside) < len(places), "some windows hold it, some do not"
    for window, (first, last) in inside:
        assert (
            CONTEXT[
                window.offsets[first - window.first][0] : window.offsets[last - window.first][1]
            ]
            == "longest"
        )


def test_characters_of_several_bytes_are_whole() -> None:
    (windows,) = Windows(ByT5Tokenizer(), at_most=60, stride=3, where="t").cut(
        ["q"], ["né à Paris"]
    )
    first, last = windows[0].place((3, 4))
    assert last == first + 1, "two bytes"
    assert windows[0].offsets[first - windows[0].first] == (3, 4)


def test_a_large_stride_leaves_no_gaps() -> None:
    (windows,) = Windows(ByT5Tokenizer(), at_most=20, stride=500, where="t").cut(
        ["what"], [CONTEXT]
    )
    room = 20 - len("what") - 2
    assert [window.offsets[0][0] for window in windows[:3]] == [0, room // 2, 2 * (room // 2)]
    assert windows[-1].offsets[-1][1] == len(CONTEXT)


def test_no_room_for_a_question_is_refused() -> None:
    with pytest.raises(
        IncompatibleError,
        match=r"task squad: .*max_length 3 leaves no room for question and context",
    ):
        goal(max_length=3)


# spans


def test_the_best_span_is_the_one_of_a_search_over_all() -> None:
    draw = torch.Generator().manual_seed(3)
    start, end = (torch.randn(6, 17, generator=draw) for _ in range(2))
    inside = torch.rand(6, 17, generator=draw) < 0.6
    best, first, last = best_spans(start, end, inside, longest=4)
    for row in range(6):
        spans = [
            (i, j)
            for i in range(17)
            for j in range(i, min(i + 4, 17))
            if inside[row, i] and inside[row, j]
        ]
        i, j = max(spans, key=lambda span: float(start[row, span[0]] + end[row, span[1]]))
        assert (int(first[row]), int(last[row])) == (i, j)
        assert float(best[row]) == pytest.approx(float(start[row, i] + end[row, j]), rel=1e-6)


class Pointer:
    """A model whose logits are given: row of the batch -> token -> logit, at start and end alike."""

    def __init__(self, logits: dict[int, dict[int, float]]) -> None:
        self.logits = logits

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        scores = torch.full(input_ids.shape, -9.0)
        for row, tokens in self.logits.items():
            for token, value in tokens.items():
                scores[row, token] = value
        return type("Output", (), {"start_logits": scores, "end_logits": scores})


def answer_of(made: SpanObjective, data: Dataset, logits: dict[int, dict[int, float]]) -> str:
    points = made.predict(Pointer(logits), made.collate_eval(list(data)), synced=False)
    found = made.merge(data, points)
    assert (found.index, found.groups) == (["validation/0"], None)
    return str(found.predictions[0])


def test_the_answer_is_the_best_span_of_all_windows_and_never_of_the_question() -> None:
    made = goal()
    data = windows_of(made, question(["Amazon"]))
    assert len(data) > 2
    token = data[2]["first"]
    character = CONTEXT[data[2]["offsets"][0]]
    assert answer_of(made, data, {1: {data[1]["first"]: 1.0}, 2: {token: 2.0}}) == character
    high_elsewhere = {0: {0: 50.0, 1: 50.0}, 1: {len(data[1]["input_ids"]) - 1: 50.0}}
    assert answer_of(made, data, {**high_elsewhere, 2: {token: 2.0}}) == character, (
        "the question and the end token are no answers"
    )


def test_no_answer_wins_only_where_it_may_and_only_if_every_window_prefers_it() -> None:
    for name, silent in (("squad", False), ("squad2", True)):
        made = goal(name)
        data = windows_of(made, question(["Amazon"]))
        nowhere = {row: {0: 5.0} for row in range(len(data))}
        assert (answer_of(made, data, nowhere) == "") == silent
        first = data[1]["first"]
        assert answer_of(made, data, {**nowhere, 1: {0: -20.0, first: 4.0}}) != "", (
            "the least of the windows' scores for no answer counts"
        )


def test_an_answer_is_no_longer_than_the_target() -> None:
    made = goal(target_max_length=3)
    data = windows_of(made, question(["Amazon"]))
    first = data[0]["first"]
    assert len(answer_of(made, data, {0: {first: 9.0, first + 1: 1.0, first + 5: 9.0}})) <= 3


def test_a_window_without_the_whole_answer_learns_the_first_token() -> None:
    rows = list(windows_of(goal(), question(["6,400 km"])))
    spans = [(row["start_positions"], row["end_positions"]) for row in rows]
    assert (0, 0) in spans and len(set(spans)) > 1
    for row, (start, end) in zip(rows, spans, strict=True):
        if (start, end) != (0, 0):
            low = row["offsets"][2 * (start - row["first"])]
            high = row["offsets"][2 * (end - row["first"]) + 1]
            assert CONTEXT[low:high] == "6,400 km"


def test_an_answer_a_little_beside_its_place_is_found_and_one_that_is_nowhere_refused() -> None:
    columns = question(["6,650"])
    columns["starts"] = [[columns["starts"][0][0] - 1]]
    assert (
        goal().encode(columns)["start_positions"]
        == goal().encode(question(["6,650"]))["start_positions"]
    )
    with pytest.raises(DataError, match="answer 'Congo' does not stand in its context 'The Amazon"):
        goal().encode({**question(["6,650"]), "texts": [["Congo"]]})


def test_spaces_and_accents_at_an_answers_edges_are_not_cut_off() -> None:
    made = goal(tokenizer=word_pieces())
    plain = made.encode(question(["longest"]))
    assert max(plain["start_positions"]) > 0
    for answer in ("longest ", " longest"):
        found = made.encode(question([answer]))
        for key in ("start_positions", "end_positions"):
            assert found[key] == plain[key]
    # a zero-width space, which BERT's tokenizer drops
    hidden = question(["longest"])
    text = hidden["context"][0].replace("longest", "longest\u200b")
    found = made.encode({**hidden, "context": [text], "texts": [["longest\u200b"]]})
    for key in ("start_positions", "end_positions"):
        assert found[key] == plain[key]


@pytest.mark.parametrize("name", ["squad", "squad2"])
def test_a_tiny_encoder_learns_to_point(name: str) -> None:
    made = goal(name, max_length=128)
    task = load_task(name)
    columns = {key: [task_row(task, n)[key] for n in range(5)] for key in task.columns}
    data = windows_of(made, columns)
    torch.manual_seed(0)
    model = AutoModelForQuestionAnswering.from_config(BERT).train()
    learn(model, made.collate(list(data)), learning_rate=5e-3)
    with torch.no_grad():
        answered = made.merge(
            data, made.predict(model.eval(), made.collate_eval(list(data)), synced=False)
        )
    assert len(answered.index) == 5
    assert made.score(answered.predictions, answered.golds) == {"em": 100.0, "token_f1": 100.0}


@pytest.mark.parametrize(("kind", "name"), [("encoder-decoder", "squad"), ("decoder", "squad2")])
def test_others_write_the_first_accepted_answer_or_nothing(kind: Any, name: str) -> None:
    training = TrainingConfig(max_length=64, target_max_length=12)
    made = make_objective(
        load_task(name),
        kind=kind,
        tokenizer=ByT5Tokenizer(),
        training=training,
        decoder_objective="head",
    )
    columns = {**question(["Amazon", "The Amazon"])}
    if name == "squad2":
        columns = {key: values * 2 for key, values in columns.items()} | {
            "texts": [["Amazon", "The Amazon"], []],
            "starts": [[4, 0], []],
        }
    found = made.encode(columns)
    written = [
        ByT5Tokenizer().decode([i for i in ids if i >= 0], skip_special_tokens=True).strip()
        for ids in found["labels"]
    ]
    assert written == ["Amazon", ""][: len(written)]
    assert found["gold"] == [["Amazon", "The Amazon"], [""]][: len(written)]
    read = ByT5Tokenizer().decode(found["input_ids"][0], skip_special_tokens=True)
    assert (
        read.startswith("question: what is longest context: The Amazon")
        and len(found["input_ids"][0]) <= made.positions
    )


# rows that cannot be used


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"answers": {"text": [], "answer_start": []}}, "row 3 has no answer .*unanswerable: true"),
        ({"answers": {"text": ["one"], "answer_start": [0, 1]}}, "row 3 has 1 texts and 2 starts"),
        (
            {"answers": {"text": ["one", None], "answer_start": [0, 1]}},
            "row 3 has a null in the list",
        ),
        ({"id": "00000001"}, "'00000001' names row 1 of split 'train' and row 3 of split 'train'"),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says):
        _prepare_changed("train", changes, tmp_path)


def test_a_row_in_two_splits_is_found_by_its_id(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="'00000001' names row 1 of split 'train' and row 3 of split 'validation'"
    ):
        _prepare_changed("validation", {"id": "00000001"}, tmp_path)


def test_answers_may_be_large_strings(tmp_path: Path) -> None:
    """As polars writes them."""
    text = pa.large_list(pa.large_string())
    answers = pa.struct({"text": text, "answer_start": pa.large_list(pa.int32())})
    _prepare_changed("train", {}, tmp_path, types={"answers": answers})


def _prepare_changed(
    split: str,
    changes: dict[str, Any],
    folder: Path,
    types: dict[str, pa.DataType] | None = None,
) -> None:
    task = load_task("squad")
    assert isinstance(task, QuestionAnsweringTask)
    path = write_rows(task, folder) / "rajpurkar/squad/plain_text" / f"{split}.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[3].update(changes)
    table = pa.Table.from_pylist(rows)
    for name, kind in (types or {}).items():
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].cast(kind))
    pq.write_table(table, path)
    prepare(task, goal(), limit=LimitConfig(), data_root=folder, cache=folder / "cache")
