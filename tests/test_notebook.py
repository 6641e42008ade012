"""The notebook runs from its first cell to its last, on the results committed beside it, and its stored outputs are those of a run.

`python -m tests.test_notebook` runs it and stores the outputs.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.commands import ROOT

NOTEBOOK = ROOT / "notebooks" / "results.ipynb"


def run_notebook() -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=200, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of this run
        if cell.cell_type == "code":
            # warnings of libraries on stderr name this machine's folders
            cell.outputs = [out for out in cell.outputs if out.output_type != "stream"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


@pytest.fixture(scope="module")
def ran() -> nbformat.NotebookNode:
    return run_notebook()


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    found = (
        output.get("data", {})
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    return [data[kind] for data in found if kind in data]


@pytest.mark.slow
def test_the_notebook_shows_tables_and_figures(ran: nbformat.NotebookNode) -> None:
    tables = outputs(ran, "text/html")
    assert "adapter" in tables[0] and "cpu-time-estimate" in "".join(outputs(ran, "text/plain"))
    assert "85.458716" in tables[0], (
        "full fine-tuning on SST-2, as docs/results/minilm-glue.md has it"
    )
    assert len(outputs(ran, "image/png")) == 2


@pytest.mark.slow
def test_it_is_committed_with_the_outputs_of_a_run(ran: nbformat.NotebookNode) -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    for kind in ("text/html", "text/plain"):
        assert outputs(stored, kind) == outputs(ran, kind), "python -m tests.test_notebook"


def test_it_is_committed_with_its_figures_and_with_little_data() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    assert len(outputs(stored, "image/png")) == 2
    assert str(ROOT) not in NOTEBOOK.read_text(), "no path of a machine"
    assert (
        sum(path.stat().st_size for path in Path(NOTEBOOK.parent).iterdir() if path.is_file())
        < 300_000
    )


if __name__ == "__main__":
    nbformat.write(run_notebook(), NOTEBOOK)
