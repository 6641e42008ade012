"""The notebook runs from its first cell to its last, on the results committed beside it, and is committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.commands import ROOT

NOTEBOOK = ROOT / "notebooks" / "results.ipynb"


@pytest.fixture(scope="module")
def ran() -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=200, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    found = (
        output.get("data", {})
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    return [data[kind] for data in found if kind in data]


def test_the_notebook_shows_tables_and_figures(ran: nbformat.NotebookNode) -> None:
    tables = outputs(ran, "text/html")
    assert "adapter" in tables[0] and "cpu-time-estimate" in "".join(outputs(ran, "text/plain"))
    assert "81.88" in tables[0], (
        "full fine-tuning on SST-2, as docs/results/minilm-glue-small.md has it"
    )
    assert len(outputs(ran, "image/png")) == 2


def test_it_is_committed_without_outputs_and_with_little_data() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(
        not cell.outputs and cell.execution_count is None
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    assert (
        sum(path.stat().st_size for path in Path(NOTEBOOK.parent).iterdir() if path.is_file())
        < 300_000
    )
