"""Reports of several sweeps as a static site: an index with filters, and the page of each sweep.

No server and no other file is needed: the index is one file, and links to the pages beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from suite import __version__
from suite.backbones.presets import describe
from suite.errors import ConfigError
from suite.files import write_atomic
from suite.leaderboard.fields import BY_NAME
from suite.report import tables, values
from suite.report.answer import Sentence, answer
from suite.report.compose import Form, write
from suite.report.data import Report
from suite.report.page import environment, prepared
from suite.report.table import Column, Row, Table, plain_words, values_of, without, words

INDEX = "index.html"
# Pages have a folder of their own: a sweep may be called `index`.
PAGES = "sweeps"
# Rows that a browser can filter at every keystroke. The CSV of the index has all of them.
MOST_ROWS = 5_000
# Costs that a reader may set a bound for.
BOUNDS = ("peak_memory_bytes", "energy_kwh", "train_s", "trainable_parameters", "search_energy_kwh")
FAMILY = "family of the backbone, where its name is one of `suite list backbones`"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index says of one sweep.

    Attributes:
        link: Its page, relative to the index.
        first: The first sentence of its answer.
        unfinished: Whether something of the sweep is still missing.
    """

    name: str
    link: str
    description: str
    first: Sentence
    unfinished: bool


def write_site(reports: Iterable[Report], out: Path) -> list[Path]:
    """Write the page of each sweep, and an index over all of their rows.

    Args:
        reports: One report per sweep; each is let go once its page is written.
        out: Folder of the site. Nothing outside of it is written.

    Returns:
        The files; the index comes first.

    Raises:
        ConfigError: The folder cannot be written.
    """
    entries = []
    rows: list[Row] = []
    pages = []
    sources: frozenset[str] = frozenset()
    for report in reports:
        sources |= report.energy_sources
        path = write(report, out / PAGES, Form.HTML)[0]
        pages.append(path)
        link = f"{PAGES}/{quote(path.name)}"
        entries.append(_entry(report, link))
        for row in report.shown:
            arm = report.arms[row["arm"]]
            # Pages name the part of an arm by its key, which is the same everywhere.
            links = {"sweep": link, "arm": f"{link}#{arm.anchor}"}
            rows.append(row | {"family": _family(row), "links": links})
    path = out / INDEX
    try:
        write_atomic(path, _index(entries, rows, sources).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    return [path, *pages]


def _entry(report: Report, link: str) -> Entry:
    description = ""
    # Results that were imported come without the definition of their sweep.
    if report.plan is not None:
        description = report.plan.config.description
    return Entry(report.sweep, link, description, answer(report)[0], bool(report.missing))


def _family(row: Row) -> str:
    for preset in describe():
        if preset.name == row["backbone"]:
            return preset.family
    # A folder or a hub id says nothing of its family, and an imported row has no more than that.
    return values.MISSING


def _index(entries: Sequence[Entry], rows: Sequence[Row], sources: frozenset[str]) -> str:
    # As one report, so that the index has the columns, names and units of a sweep's page.
    every = Report("all-sweeps", [dict(row) for row in rows], {}, sources=sources)
    shown = every.rows[:MOST_ROWS]
    # The columns follow from all rows, not from those shown, so that a cut changes no column.
    columns = _columns(every)
    board = prepared(columns, shown, every)
    for line in board["rows"]:
        line["links"] = line["row"]["links"]
    return (
        environment()
        .get_template("site.html")
        .render(
            report=every,
            entries=entries,
            version=__version__,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            units=values.sizes_of_units(),
            places=sorted(set(values_of(rows, "task"))),
            families=sorted(set(values_of(rows, "family"))),
            board=board,
            board_csv=_csv(every),
            bounds=_bounds(every, columns),
            left_out=len(rows) - len(shown),
        )
    )


def _columns(every: Report) -> list[Column]:
    """The columns of a sweep's leaderboard, and those that tell one sweep from another."""
    own = tables.leaderboard_columns(every)
    arm = own[0]
    first = [arm, plain_words("sweep")]
    sweeps = set(values_of(every.rows, "sweep"))
    # Ranks compare the rows of one home only, so a sweep of several homes needs this column.
    if len({(row["sweep"], row["home"]) for row in every.rows}) > len(sweeps):
        first.append(plain_words("home"))
    return [
        *first,
        replace(plain_words("family"), hint=FAMILY),
        words("backbone", values.backbone),
        *without(own, arm.head),
    ]


def _bounds(every: Report, columns: Sequence[Column]) -> list[str]:
    """Heads of the columns of costs, in the order of `BOUNDS`."""
    there = [column.head for column in columns]
    found = []
    for name in BOUNDS:
        # The head of an energy also says whether it is an estimate.
        for note in ("", every.energy_note, every.spent_note):
            head = BY_NAME[name].title + note
            if head in there and head not in found:
                found.append(head)
    return found


def _csv(every: Report) -> Table:
    table = tables.leaderboard(every)
    # These come first, because without them nobody knows where a line belongs.
    first = {"sweep": BY_NAME["sweep"].meaning, "family": FAMILY}
    return replace(table, title="All rows of all sweeps", columns={**first, **table.columns})
