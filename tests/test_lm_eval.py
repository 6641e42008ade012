"""lm-eval on models in memory: its numbers are those of a direct call, for every method, and nothing is measured twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from suite.attention import variants
from suite.backbones.loading import Head, build, load_tokenizer, resolve
from suite.cli.lm_eval import result_rows
from suite.config.arm import Arm
from suite.config.lm_eval import LmEvalConfig, Request, parse_requests
from suite.config.sweep import AttentionChoice, BackboneChoice
from suite.errors import ConfigError, DataError, IncompatibleError
from suite.evaluation.harness import Opened, check_room, evaluate, settings_of, wrap_for_lm_eval
from suite.evaluation.library import Library
from suite.evaluation.run import measure, plan
from suite.evaluation.subjects import Subject, check_head, untrained
from suite.petl import methods
from suite.petl.arm import build_arm
from suite.record.folder import Home
from suite.record.lm_eval import (
    FILE,
    Evaluation,
    LmEvalRecord,
    Score,
    Settings,
    TaskScores,
    add_evaluation,
    as_metrics,
    over_seeds,
)
from suite.record.lm_eval import read_record as read
from tests.lm_tasks import by_name, keep_caches, write_lm_tasks
from tests.test_loading import save
from tests.tiny import served, tiny_choice
from tests.toy import disturb, make_arm, resolved_tiny

METHODS = (*methods.names(), "peft:prefix-tuning")
TASKS = LmEvalConfig(tasks=["first_choose", "first_write"], batch_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lm_tasks(tmp_path_factory.mktemp("lm") / "tasks")


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_caches(tmp_path_factory.getbasetemp() / "caches", monkeypatch)


def config(folder: Path, **changes: Any) -> LmEvalConfig:
    return TASKS.model_copy(update={"include_path": str(folder), **changes})


def arm(family: str, attention: str = "pretrained") -> Arm:
    return Arm(
        backbone=tiny_choice(family), attention=AttentionChoice(name=attention), method="full"
    )


# The same numbers as a direct call


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_untrained_arm_scores_what_a_direct_call_of_lm_eval_gives_its_plain_model(
    family: str, folder: Path, tmp_path: Path
) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    subject = untrained(arm(family), Home(tmp_path))
    assert (
        measure([subject], config(folder, tasks=["first_choose:2", "first_write:2"]), device="cpu")
        == {}
    )
    ours = by_name(read(subject.folder))
    torch.manual_seed(0)
    resolved = resolve(tiny_choice(family))
    model: Any = build(resolved, Head("text")).eval()
    tokenizer: Any = load_tokenizer(resolved)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, add_bos_token=False)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    theirs: Any = lm_eval.simple_evaluate(
        lm,
        tasks=["first_choose", "first_write"],
        num_fewshot=2,
        task_manager=manager,
        log_samples=False,
    )
    for task, key, name in (
        ("first_choose", "acc,none", "acc"),
        ("first_write", "exact_match,plain", "exact_match.plain"),
    ):
        score = ours[f"{task}:2"].total.scores[name]
        found = theirs["results"][task]
        assert (score.value, score.stderr) == (
            found[key],
            pytest.approx(found[key.replace(",", "_stderr,")]),
        )


def requests_for(pairs: list[tuple[Any, ...]], kind: str) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=i) for i, pair in enumerate(pairs)
    ]  # type: ignore[arg-type]


PAIRS = [
    ("a stone answer:", " yes"),
    ("b answer:", " no, not this"),
    ("river and cloud", " y"),
    ("x", " yes"),
]


def expected_log_likelihood(model: Any, tokenizer: Any, context: str, answer: str) -> float:
    """One row, unpadded, from the model's own logits."""
    start, whole = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (context, context + answer)
    )
    with torch.no_grad():
        logits = (
            model(input_ids=torch.tensor([whole])).logits[0, -len(whole) :].float().log_softmax(-1)
        )
    return sum(float(logits[place - 1, whole[place]]) for place in range(len(start), len(whole)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_likelihoods_and_greedy_answers_are_the_trained_models_own(
    method: str, family: str
) -> None:
    toy = make_arm(method, family, "text")
    disturb(toy.model)
    model = toy.model.eval()
    tokenizer = load_tokenizer(toy.resolved)
    lm = wrap_for_lm_eval(
        Opened(model, tokenizer), dtype="fp32", max_length=100, batch_size=3, device="cpu"
    )
    found = [
        value
        for value, _ in lm.loglikelihood(requests_for(PAIRS, "loglikelihood"), disable_tqdm=True)
    ]
    assert found == pytest.approx(
        [expected_log_likelihood(model, tokenizer, *pair) for pair in PAIRS], abs=1e-4
    )  # sums of up to 13 logs
    ask = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    contexts = [context for context, _ in PAIRS]
    batched = lm.generate_until(
        requests_for([(context, ask) for context in contexts], "generate_until"), disable_tqdm=True
    )
    alone = [
        lm.generate_until(requests_for([(context, ask)], "generate_until"), disable_tqdm=True)[0]
        for context in contexts
    ]
    assert batched == alone


@pytest.mark.parametrize(
    "name", [n for n in variants.names() if "llama" in served(variants.get(n))]
)
def test_every_attention_variant_of_a_decoder_can_be_asked(name: str) -> None:
    torch.manual_seed(0)
    resolved = resolved_tiny("llama")
    options = {"span": "0-1", "anchor": "first"} if name == "shared" else {}
    model, _ = build_arm(
        resolved,
        Head("text"),
        Arm(
            backbone=resolved.choice,
            attention=AttentionChoice(name=name, options=options),
            method="full",
        ),
    )
    tokenizer = load_tokenizer(resolved)
    lm = wrap_for_lm_eval(
        Opened(model.eval(), tokenizer), dtype="fp32", max_length=100, batch_size=4, device="cpu"
    )
    found = [
        value
        for value, _ in lm.loglikelihood(requests_for(PAIRS, "loglikelihood"), disable_tqdm=True)
    ]
    assert found == pytest.approx(
        [expected_log_likelihood(model, tokenizer, *pair) for pair in PAIRS], abs=1e-4
    )  # sums of up to 13 logs


def test_casting_leaves_rotary_frequencies_in_full_precision() -> None:
    toy = make_arm("full", "llama", "text")
    before = {name: buffer.clone() for name, buffer in toy.model.named_buffers()}
    wrap_for_lm_eval(
        Opened(toy.model, load_tokenizer(toy.resolved)),
        dtype="bf16",
        max_length=64,
        batch_size=1,
        device="cpu",
    )
    assert {p.dtype for p in toy.model.parameters()} == {torch.bfloat16}
    assert before and all(
        torch.equal(buffer, before[name]) for name, buffer in toy.model.named_buffers()
    )


@pytest.mark.parametrize("method", ["peft:vera", "peft:adamss"])
def test_what_peft_keeps_beside_its_parameters_is_cast_too(method: str) -> None:
    toy = make_arm(method, "llama", "text")
    lm = wrap_for_lm_eval(
        Opened(toy.model.eval(), load_tokenizer(toy.resolved)),
        dtype="bf16",
        max_length=64,
        batch_size=1,
        device="cpu",
    )
    asked = requests_for(PAIRS[:1], "loglikelihood")
    assert lm.loglikelihood(asked, disable_tqdm=True)[0][0] < 0


# What was measured is kept, and not measured again


def test_a_backbone_in_a_folder_is_known_by_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    choice = BackboneChoice(name="./model", tokenizer="bytes")
    folders = set()
    for number, dtype in enumerate([torch.float32, torch.bfloat16]):
        place = tmp_path / str(number)
        save("llama", place / "model", dtype=dtype)
        monkeypatch.chdir(place)
        folders.add(untrained(Arm(backbone=choice, method="full"), home).folder)
    assert len(folders) == 2


def counting(subject: Subject, calls: list[Path]) -> Subject:
    def load() -> Opened:
        calls.append(subject.folder)
        return subject.open()

    return Subject(subject.folder, subject.names, subject.positions, load)


def test_only_what_is_new_is_measured(folder: Path, tmp_path: Path) -> None:
    calls: list[Path] = []
    subject = counting(untrained(arm("llama"), Home(tmp_path)), calls)
    first = config(folder, tasks=["first_choose"], limit=4)
    for wanted, loads in (
        (first, 1),
        (first, 1),
        (first.model_copy(update={"limit": 5}), 2),
        (config(folder, limit=4), 3),
    ):
        measure([subject], wanted, device="cpu")
        assert len(calls) == loads
    assert sorted(by_name(read(subject.folder))) == [
        "first_choose/limit-4",
        "first_choose/limit-5",
        "first_write/limit-4",
    ]
    before = by_name(read(subject.folder))["first_choose/limit-4"]
    measure([subject], first, device="cpu", again=True)
    after = by_name(read(subject.folder))["first_choose/limit-4"]
    assert after.finished_at > before.finished_at and after.total == before.total


def test_a_plan_names_the_results_of_its_own_settings(folder: Path, tmp_path: Path) -> None:
    subject = untrained(arm("llama"), Home(tmp_path))
    for length in (64, 32, 64):
        wanted = config(folder, tasks=["first_choose"], limit=2, max_length=length)
        measure([subject], wanted, device="cpu")
        _, keys = plan([subject], wanted, Library(folder), device="cpu")
        (found,) = read(subject.folder).only(keys[subject.folder]).evaluations.values()
        assert found.settings.max_length_tokens == length


def test_a_changed_task_file_is_another_evaluation(tmp_path: Path) -> None:
    folder = write_lm_tasks(tmp_path / "tasks")
    subject = untrained(arm("llama"), Home(tmp_path))
    wanted = config(folder, tasks=["first_choose"])

    def left() -> int:
        return len(plan([subject], wanted, Library(folder), device="cpu")[0])

    measure([subject], wanted, device="cpu")
    assert left() == 0
    path = folder / "first_choose.yaml"
    path.write_text(path.read_text().replace("first: ", "letter: "))
    assert left() == 1


def test_a_tag_becomes_a_group_weighted_by_size_and_keeps_its_parts(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tasks"
    write_lm_tasks(path)
    text = (path / "first_choose.yaml").read_text().replace("first_letter", "sizes")
    lines = (path / "rows.jsonl").read_text().splitlines(keepends=True)
    for name, count in (("few", 4), ("many", 12)):
        (path / f"{name}.jsonl").write_text("".join(lines[:count]))
        (path / f"{name}.yaml").write_text(
            text.replace("first_choose", name).replace("rows.jsonl", f"{name}.jsonl")
        )
    subject = untrained(arm("llama"), Home(tmp_path))
    measure([subject], config(path, tasks=["sizes"]), device="cpu")
    found = by_name(read(subject.folder))["sizes"]
    few = found.parts["few"]
    many = found.parts["many"]
    assert (few.samples, many.samples, found.total.samples) == (4, 12, 16)
    mean = (few.scores["acc"].value * 4 + many.scores["acc"].value * 12) / 16
    assert found.total.scores["acc"].value == pytest.approx(mean)


def made(
    value: float,
    *,
    shots: int | None = None,
    stderr: float | None = 0.1,
    at: float = 1.0,
    **changes: Any,
) -> Evaluation:
    settings = Settings(
        task="t", shots=shots, max_length_tokens=8, dtype="fp32", seed=0, lm_eval="1", **changes
    )
    total = TaskScores(scores={"acc": Score(value=value, stderr=stderr)}, samples=3)
    return Evaluation(
        settings=settings, total=total, device="cpu", batch_size="1", seconds=1.0, finished_at=at
    )


def test_numbers_over_seeds_are_mean_sample_deviation_and_mean_standard_error() -> None:
    records = [LmEvalRecord(evaluations={"k": made(value, shots=5)}) for value in (0.5, 0.7)] + [
        LmEvalRecord()
    ]
    found = over_seeds(records)
    assert found["t:5"]["acc"] == {
        "mean": pytest.approx(0.6),
        "std": pytest.approx(0.1 * 2**0.5),
        "stderr": pytest.approx(0.1),
        "seeds": 2,
    }
    assert as_metrics(found) == {
        "lm_eval.t:5.acc": pytest.approx(0.6),
        "lm_eval.t:5.acc_std": pytest.approx(0.1 * 2**0.5),
        "lm_eval.t:5.acc_stderr": pytest.approx(0.1),
    }
    alone = over_seeds([LmEvalRecord(evaluations={"k": made(0.5, stderr=None)})])
    assert alone["t"]["acc"] == {"mean": 0.5, "std": None, "stderr": None, "seeds": 1}


def test_only_numbers_of_equal_settings_are_averaged(tmp_path: Path) -> None:
    for name, value in (("a", 0.5), ("b", 0.7)):
        add_evaluation(tmp_path / name, made(value))
    add_evaluation(tmp_path / "b", made(0.1, at=2.0, definition="d"))
    records = [read(tmp_path / "a"), read(tmp_path / "b")]
    both = over_seeds(records)["t"]["acc"]
    assert (both["mean"], both["seeds"]) == (pytest.approx(0.6), 2), "most seeds have it"
    add_evaluation(tmp_path / "a", made(0.3, at=3.0, definition="d"))
    later = over_seeds([read(tmp_path / "a"), read(tmp_path / "b")])["t"]["acc"]
    assert (later["mean"], later["seeds"]) == (pytest.approx(0.2), 2), "as many, and later"


def test_rows_are_of_the_settings_that_were_asked_for(tmp_path: Path) -> None:
    subject = untrained(arm("llama"), Home(tmp_path))
    asked = made(0.9)
    add_evaluation(subject.folder, asked)
    add_evaluation(subject.folder, made(0.1, at=2.0, definition="d"))
    rows = result_rows([subject], {subject.folder: {asked.settings.key}})
    assert [row["value"] for row in rows] == [0.9]


def test_a_file_cut_short_counts_as_none(tmp_path: Path) -> None:
    add_evaluation(tmp_path, made(0.9))
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-20])
    assert read(tmp_path) == LmEvalRecord()


def test_a_file_of_another_version_is_neither_read_nor_overwritten(tmp_path: Path) -> None:
    add_evaluation(tmp_path, made(0.9))
    later = (tmp_path / FILE).read_text().replace('"schema_version": 1', '"schema_version": 2')
    (tmp_path / FILE).write_text(later)
    for ask in (lambda: read(tmp_path), lambda: add_evaluation(tmp_path, made(0.1))):
        with pytest.raises(ConfigError, match="got schema version 2, expected 1; move it away"):
            ask()
    assert (tmp_path / FILE).read_text() == later


# Mistakes are found before a model is loaded


def refusing() -> Opened:
    raise AssertionError("the model was loaded")


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        # These two read lm-eval's own index of 14,000 files.
        pytest.param(
            {"tasks": ["first_chose"]},
            ConfigError,
            "unknown lm-eval task 'first_chose'; did you mean first_choose",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"tasks": ["gsm8k"]},
            DataError,
            "lm-eval task gsm8k: cannot be loaded: .*gsm8k.*connect this machine to the hub once, or",
            marks=pytest.mark.slow,
        ),
        ({"max_length": 500}, ConfigError, "max_length 500: this model has room for 128 tokens"),
        (
            {"tasks": ["first_write"], "max_length": 5},
            ConfigError,
            "an answer may have 5 tokens, but the model sees 5",
        ),
        ({"include_path": "nowhere"}, ConfigError, "include_path nowhere: no such folder"),
    ],
)
def test_a_mistake_is_found_before_the_model_is_loaded(
    changes: dict[str, Any], error: type[Exception], said: str, folder: Path, tmp_path: Path
) -> None:
    subject = untrained(arm("llama"), Home(tmp_path))
    with pytest.raises(error, match=said):
        measure(
            [Subject(subject.folder, subject.names, subject.positions, refusing)],
            config(folder, **changes),
            device="cpu",
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": ["first_choose:30"]}, "first_choose:30: cannot be measured: .*fewer rows than"),
        ({"tasks": ["first_choose"], "max_length": 1}, "an answer of more than 1 tokens"),
    ],
)
def test_a_task_that_lm_eval_cannot_ask_is_told_of_each_model(
    changes: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    subjects = [untrained(arm(family), Home(tmp_path)) for family in ("llama", "gpt2")]
    failed = measure(subjects, config(folder, **changes), device="cpu")
    assert list(failed) == [str(subject.folder) for subject in subjects]
    for why in failed.values():
        assert re.search(said, why)


def test_a_folder_that_cannot_be_written_is_found_before_the_model_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    subject = untrained(arm("llama"), Home(tmp_path))
    # Root may write everywhere, but not into a folder that is a file.
    subject.folder.parent.write_text("")
    with pytest.raises(NotADirectoryError, match=subject.folder.name):
        measure(
            [Subject(subject.folder, subject.names, subject.positions, refusing)],
            config(folder, tasks=["first_choose"]),
            device="cpu",
        )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "metric: acc",
            "metric: no_such_metric",
            "no metric no_such_metric, and code for it is not downloaded|cannot be loaded",
        ),
        ("metadata:", "num_fewshot: 0\nmetadata:", "fixes first_choose to 0 shots; leave :2 out"),
        ("metadata:", "unsafe_code: true\nmetadata:", "runs code that the model writes"),
        ("rows.jsonl", "lost.jsonl", "cannot be loaded: .*lost.jsonl.*correct it"),
        ("doc_to_text: ", "doc_to_text: !function nothing.at_all #", "cannot be loaded"),
    ],
)
def test_a_task_file_that_cannot_be_used_is_refused_by_name(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    folder = write_lm_tasks(tmp_path / "tasks")
    path = folder / "first_choose.yaml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises((ConfigError, DataError), match=said) as raised:
        Library(folder).load(Request("first_choose", 2))
    assert "first_choose" in str(raised.value)


@pytest.mark.parametrize("text", [":5", "gsm8k:", "gsm8k:five", "gsm8k:-1"])
def test_shots_are_a_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME or NAME:SHOTS"):
        parse_requests([text])


def test_only_models_that_write_can_be_asked(tmp_path: Path) -> None:
    for family, kind in (("bert", "encoder"), ("t5", "encoder-decoder")):
        with pytest.raises(IncompatibleError, match=f"is an {kind}"):
            untrained(arm(family), Home(tmp_path))
    with pytest.raises(IncompatibleError, match="trained on sst2 with a classification head"):
        check_head(Head("classification", 2), arm("llama"), "sst2")


def test_settings_name_everything_that_decides_the_numbers(folder: Path) -> None:
    library = Library(folder)
    base = config(folder)
    keys = [
        settings_of(
            Request("first_choose", shots),
            base.model_copy(update=changes),
            library,
            positions=positions,
            device=device,
        ).key
        for shots, changes, positions, device in (
            (None, {}, 128, "cpu"),
            (1, {}, 128, "cpu"),
            (None, {"limit": 3}, 128, "cpu"),
            (None, {"seed": 1}, 128, "cpu"),
            (None, {}, 108, "cpu"),
            (None, {}, 128, "cuda"),
            (None, {"dtype": "fp16"}, 128, "cpu"),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert (
        settings_of(
            Request("first_choose"),
            base.model_copy(update={"batch_size": 1}),
            library,
            positions=128,
            device="cpu",
        ).key
        == keys[0]
    )


def test_the_batch_size_that_lm_eval_finds_for_itself_changes_nothing(folder: Path) -> None:
    library = Library(folder)
    toy = make_arm("full", "llama", "text")
    request = Request("first_choose")
    settings = settings_of(request, config(folder), library, positions=128, device="cpu")
    opened = Opened(toy.model, load_tokenizer(toy.resolved))
    found = [
        evaluate(opened, library.load(request), settings, batch_size=size, device="cpu")
        for size in ("auto", 1)
    ]
    assert found[0].total == found[1].total
    assert [evaluation.batch_size for evaluation in found] == ["auto", "1"]


def test_a_task_used_for_one_model_gives_the_next_the_same_questions(folder: Path) -> None:
    library = Library(folder)
    toy = make_arm("full", "llama", "text")
    loaded = library.load(Request("first_choose", 3))
    settings = None
    opened = Opened(toy.model, load_tokenizer(toy.resolved))
    found = []
    for seed in (1, 2, 1):
        settings = settings_of(
            Request("first_choose", 3),
            config(folder, seed=seed),
            library,
            positions=128,
            device="cpu",
        )
        check_room(loaded, settings)
        evaluate(opened, loaded, settings, batch_size=8, device="cpu")
        found.append([instance.args for instance in loaded.leaves[0].instances])
    assert found[0] == found[2] != found[1]


def test_a_variant_that_draws_says_so_because_each_run_starts_from_others() -> None:
    def draws(name: str, **options: Any) -> bool:
        return variants.get(name).configure(options).draws

    assert draws("wgqa", init="random") and not draws("wgqa") and not draws("pretrained")
    assert draws("cla", over={"name": "wgqa", "options": {"init": "random"}})
