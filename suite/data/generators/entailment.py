"""Entailment by what things are and by what "no" denies, with things that training never shows.

Source: ours; hypernymy and negation as in the diagnostic set of GLUE (Wang et al. 2019, arXiv 1804.07461, appendix).
Deviations: rows come in fours in which every word occurs twice with either label. "Anna saw a rose" entails "Anna saw
a flower" and not "Anna saw a tool". If asked for, premises also deny: "Anna saw a rose but no hammer" entails the first
and "Anna saw a hammer but no rose" the second. Things of one split do not occur in another; the kinds do.
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
"""Kinds that share no thing."""
SUBJECTS = ("she", "he", "Anna", "Tom")
VERBS = ("saw", "found", "bought", "drew")
DENIALS = ("{who} {verb} {thing} but no {other}", "{who} {verb} no {other} but {thing}")
ENTAILED, NOT_ENTAILED = 0, 1


class EntailmentOptions(Options):
    """Sizes, and the share of groups whose premise also denies something."""

    denied_frac: Annotated[float, Field(ge=0, le=1)] = 0.0


class Entailment(Generator[EntailmentOptions]):
    description = (
        "entailment by kind (and scope of negation); every word occurs equally with either label, test things are never seen in training"
    )
    Options = EntailmentOptions

    def group(self, split: str, rng: random.Random) -> Sequence[Row]:
        kinds = rng.sample(sorted(KINDS), 2)
        things = [rng.choice(self.share(KINDS[kind], split)) for kind in kinds]
        who, verb = rng.choice(SUBJECTS), rng.choice(VERBS)
        form = rng.choice(DENIALS) if rng.random() < self.options.denied_frac else "{who} {verb} {thing}"
        return [
            {
                "premise": form.format(who=who, verb=verb, thing=_one(things[had]), other=things[1 - had]),
                "hypothesis": f"{who} {verb} {_one(kinds[asked])}",
                "label": ENTAILED if had == asked else NOT_ENTAILED,
            }
            for had in (0, 1)
            for asked in (0, 1)
        ]


def _one(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
