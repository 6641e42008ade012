"""Sentiment of a remark, told by one adjective that training never shows.

Source: ours; the question of SST-2 (Socher et al. 2013), with new words as in the diagnostic set of
    GLUE (Wang et al. 2019, arXiv 1804.07461).
Deviations: rows come in twos that differ in the adjective alone. No adjective of one split occurs
    in another, so a word that was learnt by heart tells nothing about the test set. What the
    adjective means does, and pretraining has taught it: of the generated tasks this is the one that
    the fewest steps learn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from suite.data.generators.base import Generator, Options, Row

PRAISE = """
excellent wonderful delightful superb brilliant fantastic marvelous great lovely amazing charming
pleasant perfect beautiful impressive enjoyable outstanding splendid terrific magnificent elegant
graceful inspiring refreshing remarkable fabulous stunning gorgeous admirable exquisite
"""
BLAME = """
terrible awful horrible dreadful poor disappointing boring dull mediocre bad ugly unpleasant tedious
annoying useless pathetic lousy miserable disgusting appalling clumsy worthless depressing
irritating ridiculous hideous shabby inferior atrocious tiresome
"""
NOUNS = """
meal film hotel book song play room story view garden concert lecture service trip speech painting
novel soup party museum dress dance show game house beach tour poem wine dinner
"""
"""What the remarks are about; all splits speak of the same things."""
REMARKS = (
    "the {noun} was {adjective}",
    "we found the {noun} {adjective}",
    "it was a most {adjective} {noun}",
    "everybody called the {noun} {adjective}",
    "this {noun} is {adjective}",
    "such {adjective} work, this {noun}",
)
NEGATIVE = 0
POSITIVE = 1


class Sentiment(Generator[Options]):
    description = (
        "praise or complaint; the remarks of a pair differ in one adjective, which is never seen in"
        " training"
    )

    def group(self, split: str, rng: random.Random) -> Sequence[Row]:
        remark = rng.choice(REMARKS)
        noun = rng.choice(NOUNS.split())
        rows = []
        for words, label in ((PRAISE, POSITIVE), (BLAME, NEGATIVE)):
            adjective = rng.choice(self.share(words, split))
            sentence = remark.format(noun=noun, adjective=adjective)
            rows.append({"sentence": sentence, "label": label})
        return rows
