"""The lines of Python in a model card. Each block runs as it is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from suite.config.task import ClassificationTask
from suite.data.objective import fill_row
from suite.export.base import base_name, reads_plain_text
from suite.export.description import BASE, Description
from suite.export.predict import text_columns
from suite.train.restore import Restored


def loading_lines(restored: Restored, description: Description, name: str) -> Iterator[str]:
    """Yield a block with `suite.load`, and those without the suite where the format has any.

    Args:
        name: The folder, as the blocks call it.
    """
    columns = text_columns(restored.spec.task)
    texts = [_quoted(f"the {column}") for column in columns]
    row = texts[0]
    if len(texts) > 1:
        row = f"({', '.join(texts)})"
    yield from _block(
        "import suite", f"model = suite.load({_quoted(name)})", f"print(model.predict([{row}]))"
    )
    if restored.objective.head.kind == "choice":
        yield ""
        yield (
            "Inputs of `model.model` are (rows, choices, tokens) there."
            " Without the suite, every choice is scored as a text of its own."
        )
    # No library but the suite can read this format.
    if description.format == "suite":
        return
    yield from ("", "or, without the suite,", "")
    # Where the base is not copied, its configuration does not have the labels.
    labelled = description.format == "transformers" or description.base == "copy"
    if reads_plain_text(restored) and labelled and _fits_pipeline(restored):
        yield from _block(
            "from transformers import pipeline",
            f'classify = pipeline("text-classification", {_quoted(name)}, truncation=True)',
            f"print(classify({_pipeline_text(restored)}))",
        )
        yield from ("", "or, for the model itself,", "")
    yield from _model_block(restored, description, name)
    # The suite refuses peft's own prompts on decoders, so only ours gets here.
    if restored.spec.arm.method == "prompt" and restored.resolved.family.kind == "decoder":
        yield ""
        yield (
            "There, let it write answers for one text at a time, or for texts of equal length: peft"
            " counts the padding of a batch as positions, and the answers change."
        )


def _fits_pipeline(restored: Restored) -> bool:
    """Whether a pipeline can load the adapter; peft itself loads every one.

    A pipeline has peft put it into a model, which peft does not do with prompts, nor with adapters
    whose layers share weights.
    """
    model: Any = restored.model
    if not hasattr(model, "get_base_model"):
        return True
    shared = getattr(model.base_model, "uses_shared_state", False)
    return not (shared or model.active_peft_config.is_prompt_learning)


def _quoted(text: str) -> str:
    """A text as Python's source has it: a folder's name may have quotes and backslashes."""
    return json.dumps(text, ensure_ascii=False)


def _block(first: str, *lines: str) -> Iterator[str]:
    """Yield a block of Python: an import, an empty line, and the rest."""
    yield from ("```python", first, "", *lines, "```")


def _model_block(restored: Restored, description: Description, name: str) -> Iterator[str]:
    model: Any = restored.model
    # The reader loads the class below peft's wrapper.
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    kind = type(model).__name__
    if description.format == "transformers":
        yield from _block(
            f"from transformers import {kind}", f"model = {kind}.from_pretrained({_quoted(name)})"
        )
        return
    if reads_plain_text(restored) and description.base == "copy":
        auto = "AutoPeftModelForSequenceClassification"
        yield from _block(
            f"from peft import {auto}", f"model = {auto}.from_pretrained({_quoted(name)})"
        )
        return
    imports = ["from peft import PeftModel", f"from transformers import {kind}"]
    if restored.resolved.origin == "package" and description.base == "name":
        imports = ["from importlib.resources import files", "", *imports]
    yield from _block(
        "\n".join(imports),
        f"base = {kind}.from_pretrained({_base_arguments(restored, description, name)})",
        f"model = PeftModel.from_pretrained(base, {_quoted(name)})",
    )


def _pipeline_text(restored: Restored) -> str:
    """A row as a text-classification pipeline reads it: a text, or a pair of texts."""
    task = restored.spec.task
    assert isinstance(task, ClassificationTask)
    row = {column: f"the {column}" for column in task.inputs}
    texts = list(row.values())
    if task.pair is not None:
        texts = [fill_row(template, row) for template in task.pair]
    if len(texts) == 1:
        return repr(texts[0])
    return repr({"text": texts[0], "text_pair": texts[1]})


def _base_arguments(restored: Restored, description: Description, name: str) -> str:
    """The arguments of `from_pretrained` that give the adapter's base."""
    if description.base == "copy":
        return _quoted(f"{name}/{BASE}")
    base = base_name(restored)
    place = _quoted(base)
    if restored.resolved.origin == "package":
        package, _, inside = base.removeprefix("package:").partition("/")
        place = f"str(files({_quoted(package)}) / {_quoted(inside)})"
    # As it was trained, whatever the precision of its file.
    arguments = f"{place}, dtype={_quoted(description.dtype)}"
    revision = description.base_identity.get("commit")
    if revision:
        arguments += f", revision={_quoted(revision)}"
    head = restored.objective.head
    if head.kind in ("classification", "regression"):
        # A checkpoint that was not made for this task holds neither of these.
        config: Any = restored.model.config
        arguments += f", num_labels={head.num_labels}, pad_token_id={config.pad_token_id}"
    return arguments
