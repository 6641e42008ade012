"""Entailment by what things are and by what "no" denies, with things that training never shows.

Source: ours; hypernymy and negation as in the diagnostic set of GLUE (Wang et al. 2019, arXiv
    1804.07461, appendix).
Deviations: rows come in fours, in which every word occurs twice with either label. "her rose"
    entails "her flower" and not "her tool". If asked for, premises also deny: "her rose but no
    hammer" entails the first, "no rose but her hammer" the second. Things of one split do not occur
    in another; the kinds do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from suite.data.generators.base import Generator, Options, Row

KINDS = {
    "flower": "rose tulip daisy lily orchid sunflower violet poppy daffodil carnation",
    "tool": "hammer trowel wrench drill chisel shovel screwdriver rake spade file",
    "fruit": "apple banana orange pear peach mango cherry grape lemon plum",
    "vehicle": "car truck bus van taxi motorcycle bicycle train tractor tram",
    "instrument": "piano guitar violin flute drum trumpet cello harp clarinet saxophone",
    "animal": "dog cat horse cow sheep goat rabbit lion tiger wolf",
    "garment": "shirt jacket coat dress skirt sweater scarf hat glove sock",
    "weapon": "gun rifle pistol sword dagger spear cannon missile grenade musket",
    "building": "house church castle hotel school hospital barn temple library tower",
    "gem": "diamond ruby emerald sapphire pearl opal topaz garnet amethyst turquoise",
}
"""Kinds, no two of which share a thing."""
DETERMINERS = (
    "a",
    "the",
    "my",
    "your",
    "his",
    "her",
    "our",
    "their",
    "this",
    "that",
    "one",
    "some",
    "another",
)
"""Determiners that carry over to the kind; "every rose" would not entail "every flower"."""
DENIALS = ("{thing} but no {other}", "no {other} but {thing}")
# as in the RTE data of GLUE
ENTAILED = 0
NOT_ENTAILED = 1


class EntailmentOptions(Options):
    """Sizes, and the share of groups whose premise also denies something."""

    denied_frac: Annotated[float, Field(ge=0, le=1)] = 0.0


class Entailment(Generator[EntailmentOptions]):
    description = (
        "entailment by kind (and scope of negation); every word occurs equally with either label, "
        "test things are never seen in training"
    )
    Options = EntailmentOptions

    def group(self, split: str, rng: random.Random) -> Sequence[Row]:
        # sorted, so that the order of the dictionary in this file is no part of the data
        kinds = rng.sample(sorted(KINDS), 2)
        things = [rng.choice(self.share(KINDS[kind], split)) for kind in kinds]
        determiner = rng.choice(DETERMINERS)
        form = "{thing}"
        if rng.random() < self.options.denied_frac:
            form = rng.choice(DENIALS)
        rows = []
        # premises about either thing, hypotheses about either kind: no word tells the label
        for had in (0, 1):
            thing = _noun_phrase(determiner, things[had])
            premise = form.format(thing=thing, other=things[1 - had])
            for asked in (0, 1):
                rows.append(
                    {
                        "premise": premise,
                        "hypothesis": _noun_phrase(determiner, kinds[asked]),
                        "label": ENTAILED if had == asked else NOT_ENTAILED,
                    }
                )
        return rows


def _noun_phrase(determiner: str, noun: str) -> str:
    if determiner == "a" and noun[0] in "aeiou":
        determiner = "an"
    return f"{determiner} {noun}"
