"""Write the reports of docs/results as a static site: `python tools/reports.py FOLDER`.

Each archive there is a home without weights: the trials of a sweep, with their answers.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from suite.record.folder import Home
from suite.report.data import Report, read, sweeps
from suite.report.site import write_site
from suite.tracking.store import resolve_uri
from suite.tracking.writer import sync

ARCHIVES = Path(__file__).parents[1] / "docs" / "results"


def main() -> None:
    (out,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for path in write_site(reports(Path(folder)), Path(out)):
            print(path)


def reports(folder: Path) -> Iterator[Report]:
    """Unpack every archive into a home of its own, and read its sweeps."""
    for archive in sorted(ARCHIVES.glob("*.tar.xz")):
        home = folder / archive.name.removesuffix(".tar.xz")
        with tarfile.open(archive) as packed:
            packed.extractall(home, filter="data")
        sync(Home(home), tracking_uri=resolve_uri(Home(home), None, write=True))
        for name in sweeps(home):
            yield read(home, name)


if __name__ == "__main__":
    main()
