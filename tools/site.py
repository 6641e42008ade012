"""Lets pages of docs/ link to any file of the repository: on the site, such a file is a page under source/.

MkDocs calls the functions named `on_*`. On a code host the same links lead to the files themselves.
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
"""A Markdown link to a relative path: before, path, anchor and end."""
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside docs/ that a page links to, and for what those link to in turn."""
    open_ = {"CONTRIBUTING.md", "CHANGELOG.md"}
    for file in files.documentation_pages():
        open_ |= outside(file.content_string, f"docs/{file.src_uri}")
    added: set[str] = set()
    while open_ - added:
        path = min(open_ - added)
        added.add(path)
        text = (ROOT / path).read_text()
        files.append(File.generated(config, page_of(path), content=as_page(path, text)))
        if path.endswith(".md"):
            open_ |= outside(text, path)
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turn links to files outside docs/ into links to their pages."""
    del config, files
    uri = page.file.src_uri
    return markdown if uri.startswith("source/") else rebased(markdown, f"docs/{uri}", uri)


def page_of(path: str) -> str:
    """Where a file of the repository is on the site: `docs/cli.md` -> `cli.md`, `LICENSE` -> `source/LICENSE.md`."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def outside(text: str, path: str) -> set[str]:
    """Files of the repository, but not of docs/, that the Markdown file `path` links to."""
    links = (
        posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        for found in LINK.finditer(FENCE.sub("", text))
    )
    return {
        link for link in links if not link.startswith(("docs/", "..")) and (ROOT / link).is_file()
    }


def rebased(text: str, path: str, uri: str) -> str:
    """The Markdown of the file `path`, with links that hold on the site at `uri`; what leads nowhere stays, for MkDocs to report."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        if not (ROOT / target).is_file():
            return found[0]
        return (
            found[1] + posixpath.relpath(page_of(target), posixpath.dirname(uri) or ".") + found[3]
        )

    pieces = re.split(f"({FENCE.pattern})", text, flags=FENCE.flags)
    return "".join(piece if n % 2 else LINK.sub(link, piece) for n, piece in enumerate(pieces))


def as_page(path: str, text: str) -> str:
    """Markdown as it is, a notebook as its cells, anything else as highlighted text under its name."""
    if path.endswith(".md"):
        return rebased(text, path, page_of(path))
    if path.endswith(".ipynb"):
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return (
            "\n\n".join(
                source if kind == "markdown" else f"```python\n{source}\n```"
                for kind, source in cells
            )
            + "\n"
        )
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{text.rstrip()}\n````\n"
