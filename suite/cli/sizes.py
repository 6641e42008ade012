"""Training rows of public data sets, for estimates of a sweep before its data are read.

The numbers are those that the papers and the hub state. A data set that is not here has an unknown
size; nothing but an estimate depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from suite.config.task import HubData

# Hub id and config -> rows of the training split.
ROWS: Mapping[tuple[str, str], int] = {
    ("nyu-mll/glue", "cola"): 8_551,
    ("nyu-mll/glue", "sst2"): 67_349,
    ("nyu-mll/glue", "mrpc"): 3_668,
    ("nyu-mll/glue", "qqp"): 363_846,
    ("nyu-mll/glue", "stsb"): 5_749,
    ("nyu-mll/glue", "mnli"): 392_702,
    ("nyu-mll/glue", "qnli"): 104_743,
    ("nyu-mll/glue", "rte"): 2_490,
    ("aps/super_glue", "boolq"): 9_427,
    ("aps/super_glue", "cb"): 250,
    ("aps/super_glue", "copa"): 400,
    ("aps/super_glue", "multirc"): 27_243,
    ("aps/super_glue", "rte"): 2_490,
    ("aps/super_glue", "wic"): 5_428,
    ("aps/super_glue", "wsc.fixed"): 554,
    # The hub has this one in two forms, with the same rows.
    ("aps/super_glue", "wsc"): 554,
    ("rajpurkar/squad", "plain_text"): 87_599,
    ("rajpurkar/squad_v2", "squad_v2"): 130_319,
    ("abisee/cnn_dailymail", "3.0.0"): 287_113,
    ("alexfabbri/multi_news", "default"): 44_972,
    ("wmt/wmt14", "de-en"): 4_508_785,
    ("bentrevett/multi30k", "default"): 29_000,
    ("openai/gsm8k", "main"): 7_473,
    ("tatsu-lab/alpaca", "default"): 52_002,
    ("yahma/alpaca-cleaned", "default"): 51_760,
}
WORDS: Mapping[tuple[str, str], int] = {
    ("Salesforce/wikitext", "wikitext-2-raw-v1"): 2_088_628,
    ("Salesforce/wikitext", "wikitext-103-raw-v1"): 103_227_021,
    ("ptb-text-only/ptb_text_only", "penn_treebank"): 929_589,
}
"""Words of the training text; the end of a line counts as one."""
TOKENS_PER_WORD = 1.4
"""Tokens for a word of English, at most, with a vocabulary of 4,000 or more.

Ours: Penn Treebank has 1.34 with a byte-level BPE of 4,000 made of its own text, 1.15 with one of
30,000, and 1.23 with BERT's, which cuts its `<unk>` into four.
"""


def published_rows(data: HubData) -> int | None:
    """Training rows of a data set, None where they are not known here."""
    return ROWS.get((data.hub, data.config))


def published_tokens(data: HubData) -> int | None:
    """Tokens of running text, at most; None where they are not known here."""
    words = WORDS.get((data.hub, data.config))
    if words is None:
        return None
    return round(words * TOKENS_PER_WORD)
