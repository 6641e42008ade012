"""The documentation holds: links, the reference of commands, and the tutorial as it is written."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from suite.cli.app import ANALYSES, COMMANDS, TASKS
from suite.cli.reference import reference
from suite.leaderboard.file import read_rows
from tests.commands import ROOT, Suite, shell, suite

__all__ = ["suite"]
DOCS = ROOT / "docs"
QUICK = (
    *(
        "search.trials=1",
        "search.startup_trials=1",
        "search.edge_guard.extensions=0",
        "confirm.seeds=[1]",
    ),
    *("limit.train=96", "limit.validation=40", "limit.test=60"),
)
"""What the test changes of the tutorial's sweep, and nothing else."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; building it fails where a link or an anchor leads nowhere."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def test_the_page_names_the_commands_that_take_a_folder_of_tasks() -> None:
    take = set()
    for section in reference().split("\n## suite ")[1:]:
        if "`--tasks DIR`" in section:
            take.add(section.partition("\n")[0])
    listed = re.search(r"`--tasks DIR` \(on (.*)\)", (DOCS / "cli.md").read_text())
    assert listed is not None
    assert set(re.findall("`([^`]+)`", listed[1])) == take


def test_the_help_of_a_trial_names_what_set_takes_as_the_page_does(suite: Suite) -> None:
    told = " ".join(suite("trial", "--help")[1].split())
    page = (DOCS / "cli.md").read_text().partition("`--set` takes ")[2].partition("and the\nmethod")
    names = re.findall(r"`([a-z_.*]+)`", page[0])
    assert len(names) == 7
    assert [name for name in names if name not in told] == []


def test_the_site_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"?(https?:)?//|<link[^>]+(?:stylesheet|icon|preconnect)[^>]+href=\"?(https?:)?//"
    )
    assert [page.name for page in pages if loads.search(page.read_text())] == []


def test_a_link_to_source_leads_to_a_page_of_it(site: Path) -> None:
    assert "source/suite/config/sweep.py.html" in (site / "quickstart.html").read_text()
    assert "class SweepConfig" in re.sub(
        r"<[^>]+>", "", (site / "source/suite/config/sweep.py.html").read_text()
    )


@pytest.mark.parametrize(
    "text", ["[a](nowhere.md)", "[a](cli.md#nowhere)", "[a](../suite/nowhere.py)"]
)
def test_a_link_that_leads_nowhere_stops_the_build(tmp_path: Path, text: str) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{text}\n")
    (tmp_path / "docs" / "cli.md").write_text("# Commands\n")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    changes = {"nav": ["index.md", "cli.md"], "hooks": [str(ROOT / "tools" / "site.py")]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({**settings, **changes}))
    with pytest.raises(Abort):
        build(
            load_config(str(tmp_path / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
        )


def test_the_reference_is_current() -> None:
    assert (DOCS / "reference.md").read_text() == reference(), (
        "python -m suite.cli.reference > docs/reference.md"
    )


def test_every_command_is_in_the_reference_with_its_example() -> None:
    page = (DOCS / "reference.md").read_text()
    for group, at in ((COMMANDS, "suite"), (TASKS, "suite task"), (ANALYSES, "suite analyze")):
        for name, (_, example) in group.items():
            assert f"\n## {at} {name}\n" in page and f"\n{example}\n" in page


def test_the_hand_written_page_names_every_command() -> None:
    rows = re.findall(r"^\| (`suite .*?) \|", (DOCS / "cli.md").read_text(), re.MULTILINE)
    named = {match for row in rows for match in re.findall(r"`suite ([a-z-]+)", row)}
    assert named == {*COMMANDS, "task", "analyze"}


def test_commands_in_the_documentation_exist() -> None:
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md"):
        for line in fenced(page.read_text(), "bash"):
            words = line.split()
            if words[:1] == ["suite"] and not words[1].startswith("-"):
                assert words[1] in {*COMMANDS, "task", "analyze"}, f"{page.name}: {line}"


def fenced(text: str, language: str) -> Iterator[str]:
    """The lines of all blocks of a language."""
    for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()


def test_the_citation_has_what_readers_of_such_files_need() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["authors"] == [{"name": "The petl-suite authors"}]


# The tutorial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the files that the tutorial shows."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name, text in re.findall(
        r"^```\w+ title=\"([^\"]+)\"\n(.*?)^```",
        (DOCS / "tutorial.md").read_text(),
        re.DOTALL | re.MULTILINE,
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    # The page begins in the top folder of a clone.
    (folder / "docs").symlink_to(DOCS)
    return folder


@pytest.mark.slow
def test_the_tutorial_is_run_as_it_is_written(
    suite: Suite, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of the page, in its order; the sweep with fewer and shorter trials."""
    monkeypatch.chdir(folder)
    said: dict[str, str] = {}
    for line in fenced((DOCS / "tutorial.md").read_text(), "bash"):
        words = shlex.split(line, comments=True)
        if words[0] == "python":
            exec(compile((folder / words[1]).read_text(), words[1], "exec"), {})
        elif words[:2] == ["suite", "run"] and "--dry-run" not in words:
            changes = [text for item in QUICK for text in ("--set", item)]
            done = shell(*words[1:], *changes, cwd=folder, timeout_s=500)
            assert done.returncode == 0, done.stderr
        elif words[0] == "tar":
            subprocess.run(words, check=True)
        elif words[0] == "suite":
            code, said[words[1]], err = suite(*words[1:])
            assert code == 0, f"{line}: {err}"
    with open(folder / "train.csv", newline="") as file:
        assert len(list(csv.reader(file))) == 481
    assert "fit to compare on: 0 failed, 0 to look at" in said["task"]
    assert all(method in said["leaderboard"] for method in ("full", "lora", "bitfit"))
    assert all(method in said["compare"] for method in ("full", "lora", "bitfit"))
    assert "tickets" in next((folder / "report").glob("*.html")).read_text()


def test_the_table_of_twelve_methods_has_the_scores_of_its_results() -> None:
    results = DOCS / "results"
    lines = (results / "minilm-glue.md").read_text().splitlines()
    confirmed = [row for row in read_rows(results / "minilm-glue.parquet") if row.seeds]
    assert len(confirmed) == 12
    for row in confirmed:
        (line,) = [line for line in lines if line.startswith("| 1") and f"| `{row.method}`" in line]
        for text in (
            f"| {row.score_mean:.1f} ± {row.score_std:.1f} |",
            f"| {row.ci_low:.1f} to {row.ci_high:.1f} |",
            f"| {row.energy_kwh * 1e6:.0f} |",
            f"| {row.peak_memory_bytes / 2**20:.0f} |",
        ):
            assert text in line, line


def test_every_test_that_a_claim_names_is_there() -> None:
    claimed = set()
    for page in ("faults.md", "security.md"):
        claimed |= set(re.findall(r"(test_\w+)::(test_\w+)", (DOCS / page).read_text()))
    assert len(claimed) > 20
    for stem, name in claimed:
        (path,) = (ROOT / "tests").rglob(f"{stem}.py")
        assert f"def {name}(" in path.read_text(), f"{path.name} has no {name}"
