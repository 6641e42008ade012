"""Let pages of docs/ link to any file of the repository.

On the site such a file is a page under source/; on a code host the same links lead to the files
themselves. MkDocs calls the functions named `on_*`.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
"""A Markdown link to a relative path; its groups are `](`, the path, and the anchor with `)`."""
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
"""A block of code, in which nothing is a link."""


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside docs/ that a page links to, directly or through others."""
    wanted = {"CONTRIBUTING.md", "CHANGELOG.md"}
    for file in files.documentation_pages():
        wanted |= outside(file.content_string, f"docs/{file.src_uri}")
    added: set[str] = set()
    while wanted - added:
        path = min(wanted - added)
        added.add(path)
        text = (ROOT / path).read_text()
        files.append(File.generated(config, page_of(path), content=as_page(path, text)))
        if path.endswith(".md"):
            wanted |= outside(text, path)
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turn links to files outside docs/ into links to their pages."""
    del config, files  # MkDocs passes them by name
    uri = page.file.src_uri
    if uri.startswith("source/"):  # as_page has done it
        return markdown
    return rebased(markdown, f"docs/{uri}", uri)


def page_of(path: str) -> str:
    """Where a file of the repository is on the site.

    `docs/cli.md` is `cli.md`, and `LICENSE` is `source/LICENSE.md`.
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def outside(text: str, path: str) -> set[str]:
    """The files of the repository outside docs/ that the Markdown file `path` links to."""
    found = set()
    for link in LINK.finditer(FENCE.sub("", text)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))
        if not target.startswith(("docs/", "..")) and (ROOT / target).is_file():
            found.add(target)
    return found


def rebased(text: str, path: str, uri: str) -> str:
    """The Markdown of the file `path`, with links that hold on the site at `uri`.

    A link that leads nowhere stays, for MkDocs to report.
    """

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        if not (ROOT / target).is_file():
            return found[0]
        here = posixpath.dirname(uri) or "."
        return found[1] + posixpath.relpath(page_of(target), here) + found[3]

    # split() with a group returns text and blocks of code in turn, and text has the even numbers
    pieces = re.split(f"({FENCE.pattern})", text, flags=FENCE.flags)
    for number in range(0, len(pieces), 2):
        pieces[number] = LINK.sub(link, pieces[number])
    return "".join(pieces)


def as_page(path: str, text: str) -> str:
    """A file as Markdown: a notebook as its cells, other text highlighted under its name."""
    if path.endswith(".md"):
        return rebased(text, path, page_of(path))
    if path.endswith(".ipynb"):
        cells = []
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] != "markdown":
                source = f"```python\n{source}\n```"
            cells.append(source)
        return rebased("\n\n".join(cells) + "\n", path, page_of(path))
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(Path(path).suffix, "text")
    # four backquotes, as a file may itself hold three
    return f"# {path}\n\n````{language}\n{text.rstrip()}\n````\n"
