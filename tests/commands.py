"""Commands of `suite`, in the test's own process and in one of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from suite.cli.app import main

ROOT = Path(__file__).parents[1]
Suite = Callable[..., tuple[int, str, str]]


@pytest.fixture
def suite(capsys: pytest.CaptureFixture[str]) -> Suite:
    """Runs one command in this process: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def blocks(language: str) -> list[str]:
    """The blocks of code of a language in docs/adding.md."""
    text = (ROOT / "docs" / "adding.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def shell(
    *arguments: object, cwd: Path, timeout_s: float = 200, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs one command in a process of its own, as from a shell, from another folder than the checkout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "suite", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout_s, check=False
    )
