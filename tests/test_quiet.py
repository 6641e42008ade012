"""What libraries say that tells a user nothing is not shown: where a model is exported, answers, or trains in a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from suite.record.folder import Home
from tests.commands import ROOT
from tests.trained import trained_spec, write_trained

EXPORT = """
import sys
from pathlib import Path
import suite
from suite.export import export
from suite.export.card import Facts
from suite.record.folder import Home
from suite.train.restore import restore

home = Home(Path(sys.argv[1]))
(folder,) = home.trials()
export(restore(folder, home), Path(sys.argv[2]), Facts())
suite.load(sys.argv[2]).predict(["a sentence"])
assert "deepspeed" in sys.modules, "nothing was imported that could have said something"
"""

GROUP = """
import os, sys
from suite.train.process_group import close_process_group, free_port, init_process_group

# As in a notebook, where libraries find a copy of the file and linkers write into the file itself.
sys.stderr = os.fdopen(os.dup(2), "w")
init_process_group(
    rank=0, world_size=1, local_rank=0, address="127.0.0.1", port=free_port(), device="cpu",
    timeout_s=60.0,
)
close_process_group()
"""


def said(program: str, *args: str) -> str:
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_an_export_and_its_answers_do_not_tell_that_there_is_no_gpu(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    write_trained(home, trained_spec("lora", "bert"))
    assert "accelerator" not in said(EXPORT, str(home.path), str(tmp_path / "out"))


@pytest.mark.slow
def test_a_group_in_a_notebook_shows_neither_a_linkers_errors_nor_that_there_is_no_gpu() -> None:
    assert said(GROUP) == ""
