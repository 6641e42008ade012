"""Write reports: a page, a document, figures, tables."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from suite.errors import ConfigError
from suite.files import file_name, write_atomic

if TYPE_CHECKING:
    from suite.record.folder import Home
    from suite.report.data import Report

# The folder in the home where reports are written unless another one is given.
FOLDER = "report"


class Form(StrEnum):
    """What a report is written as."""

    HTML = "html"
    MD = "md"
    PNG = "png"
    CSV = "csv"


def build(
    home: Home | Path | str,
    sweep: str | None = None,
    *,
    out: Path | None = None,
    tracking_uri: str | None = None,
) -> Path:
    """Write the page of one sweep, from the home's files and its MLflow store as they are now.

    Args:
        home: The home of `suite run --home`.
        sweep: Name of the sweep; not needed where the home has one.
        out: Folder to write into; None = `HOME/report`.
        tracking_uri: The argument of `suite.report.read`.

    Returns:
        The page: `OUT/<sweep>.html`.

    Raises:
        TrackingError: There are no results, or none of this sweep.
        ConfigError: A record is of another version, or the folder cannot be written.
    """
    from suite.report.data import read

    place = Path(home) if isinstance(home, (Path, str)) else home.path
    report = read(place, sweep, tracking_uri=tracking_uri)
    return write(report, out or place / FOLDER, Form.HTML)[0]


def write(report: Report, out: Path, form: Form) -> list[Path]:
    """Write a report into a folder; the name of every file begins with the sweep's name.

    Returns:
        The files; the one to open comes first.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _WRITERS[form](report, out)
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be written: {error.strerror or error}; give another folder"
        ) from error


def write_page(report: Report, path: Path | None, *, home: Path) -> Path:
    """Write the page of a report into a file or a folder.

    Args:
        report: What it shows.
        path: A file that ends in .html, or a folder; None = `HOME/report`.
        home: The home.

    Raises:
        ConfigError: It cannot be written.
    """
    if path is None or path.suffix != ".html":
        return write(report, path or home / FOLDER, Form.HTML)[0]
    from suite.report.page import page

    try:
        write_atomic(path, page(report).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


# The writers import what they need: a table needs no plotly, a page no matplotlib.


def _html(report: Report, out: Path) -> list[Path]:
    from suite.report.page import page

    path = out / f"{file_name(report.sweep)}.html"
    write_atomic(path, page(report).encode())
    return [path]


def _markdown(report: Report, out: Path) -> list[Path]:
    from suite.report.document import document, draw

    pictures = draw(report, out)
    path = out / f"{file_name(report.sweep)}.md"
    write_atomic(path, document(report, pictures).encode())
    return [path, *pictures.values()]


def _pictures(report: Report, out: Path) -> list[Path]:
    from suite.report.document import draw

    return list(draw(report, out).values())


def _tables(report: Report, out: Path) -> list[Path]:
    from suite.report.content import content
    from suite.report.tables import everything

    paths = []
    # All other forms refer to these files for what they leave out.
    for table in everything(report, content(report, whole=True).figures):
        path = out / f"{file_name(f'{report.sweep}-{table.key}')}.csv"
        write_atomic(path, table.csv().encode())
        paths.append(path)
    return paths


_WRITERS = {Form.HTML: _html, Form.MD: _markdown, Form.PNG: _pictures, Form.CSV: _tables}
