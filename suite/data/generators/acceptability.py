"""Acceptability of word order: which of two orders of the same words is a sentence.

Source: ours; minimal pairs after BLiMP (Warstadt et al. 2020, arXiv 1912.00582), the question of
    CoLA (arXiv 1805.12471).
Deviations: in the bad twin, noun and verb have changed places. No noun, adjective or verb of one
    split occurs in another, so neither words nor word pairs seen in training tell the twins of the
    test set apart. The part of speech of new words does, and pretraining has taught it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from suite.data.generators.base import Generator, Options, Row

NOUNS = """
actor artist author baker boy brother captain clerk cook cousin dancer daughter doctor driver
farmer father friend girl guard guest hunter judge king lawyer leader manager mother neighbor
nurse officer painter patient pilot player poet prince prisoner professor queen rider sailor
scientist singer sister soldier son speaker student teacher tourist uncle visitor waiter worker
writer
"""
"""Words for persons, whose plurals all end in s."""
ADJECTIVES = """
young happy old angry quiet famous rich lonely clever proud lazy polite brave gentle nervous
honest careful cheerful bitter wise modest stubborn curious friendly
"""
VERBS = """
sang danced slept waited laughed smiled worked arrived returned prayed cried shouted walked
stopped ate spoke listened escaped stood cooked
"""
"""Verbs in the past tense that take no object."""
PREPOSITIONS = ("near", "behind", "with")
TWINS = (
    (
        "the {noun} {verb} {near} the {adjective} {other}",
        "the {verb} {noun} {near} the {adjective} {other}",
    ),
    (
        "the {adjective} {noun} {verb} {near} the {other}",
        "the {adjective} {verb} {noun} {near} the {other}",
    ),
)
"""An acceptable order, and one of the same words that is not acceptable."""


class Acceptability(Generator[Options]):
    description = (
        "acceptability of word order; both orders have the same words, "
        "and test words are never seen in training"
    )

    def group(self, split: str, rng: random.Random) -> Sequence[Row]:
        # a sample and not two choices, so that the two differ
        noun, other = rng.sample(self.share(NOUNS, split), 2)
        # the order of the draws is part of the data: another one would make other rows
        words = {
            "noun": noun + rng.choice(("", "s")),
            "other": other + rng.choice(("", "s")),
            "adjective": rng.choice(self.share(ADJECTIVES, split)),
            "verb": rng.choice(self.share(VERBS, split)),
            "near": rng.choice(PREPOSITIONS),
        }
        good, bad = rng.choice(TWINS)
        return [
            {"sentence": good.format(**words), "label": 1},
            {"sentence": bad.format(**words), "label": 0},
        ]
