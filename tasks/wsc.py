"""The Winograd Schema Challenge as SuperGLUE has it: does a pronoun stand for a noun?

Both are marked in the text, which is what a template cannot do: `* noun *` and `# pronoun #`.
"""

import re

TASK = {
    "description": "does a pronoun in a text stand for a certain noun",
    "source": (
        "WSC (Levesque et al. 2012), in SuperGLUE (arXiv 1905.00537), with its corrected positions; marks and label words: "
        "T5's code for classification; splits: READ (arXiv 2305.15348)"
    ),
    "version": 1,
    "data": {"hub": "aps/super_glue", "config": "wsc.fixed", "revision": "main"},
    "inputs": ["text"],
    "text_to_text": "wsc text: {text}",
    "label": {"column": "label", "words": ["False", "True"]},  # by the hub's class id
    "metrics": ["accuracy"],  # percent of rows
    "splits": {
        "rule": "read"
    },  # SuperGLUE hides its test labels, so as for GLUE: validation is halved into validation and test
}
reads = ["text", "span1_text", "span1_index", "span2_text", "span2_index", "label"]


def rows(row):
    """The text with the noun (span 1) and the pronoun (span 2) marked."""
    noun = place(row["text"], row["span1_text"], row["span1_index"])
    pronoun = place(row["text"], row["span2_text"], row["span2_index"])
    marks = [(noun[0], "* "), (noun[1], " *"), (pronoun[0], "# "), (pronoun[1], " #")]
    text = row["text"]
    for at, mark in sorted(marks, reverse=True):  # from the end, so that earlier places stay
        text = text[:at] + mark + text[at:]
    return {"text": text, "label": row["label"]}


def place(text, span, word):
    """First and last character of a span: of all places where it stands, the one nearest to the word of that number."""
    words = [found.start() for found in re.finditer(r"\S+", text)]
    near = words[min(word, len(words) - 1)]
    starts = [found.start() for found in re.finditer(f"(?={re.escape(span)})", text)]
    if not starts:
        raise ValueError(f"{span!r} does not stand in {text!r}")
    start = min(starts, key=lambda at: abs(at - near))
    return start, start + len(span)
