"""`benchmarks.chaos`: its faults of disk and clock reach a process, and a run that ends goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import shim
from benchmarks.chaos import EARLY, Record, Tally, known_kinds

LOOK = """
import ctypes, errno, os, sys, time
from pathlib import Path

def tried(work):
    try:
        work()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"

def sync(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)

# As a process does that sets its title: the text of the environment is written over
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_void_p
ctypes.memset(getenv(b"SUITE_SHIM_BELOW"), 0, 1)
inside, outside, real_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
for _ in sys.stdin:
    made = [tried(lambda: (folder / "new").write_text("x")) for folder in (inside, outside)]
    synced = [tried(lambda: sync(folder / "old")) for folder in (inside, outside)]
    renamed = tried(lambda: (inside / "old").rename(inside / "old"))
    print(*made, *synced, renamed, round((time.time() - real_s) / 3600), flush=True)
"""


@pytest.mark.skipif(shim.why_not() is not None, reason=str(shim.why_not()))
def test_disk_and_clock_fail_as_they_are_told(tmp_path: Path) -> None:
    inside = tmp_path / "home"
    for folder in (inside, tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "old").write_text("")
    control = tmp_path / "control"
    shim.disturb(control)
    shim.build(tmp_path / "shim.so")
    there = os.environ | shim.environment(tmp_path / "shim.so", control, below=inside)
    now_s = str((tmp_path / "old").stat().st_mtime)
    words = [sys.executable, "-S", "-c", LOOK, str(inside), str(tmp_path), now_s]
    with subprocess.Popen(
        words, env=there, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def look() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert look() == "ok ok ok ok ok 0"
        shim.disturb(control, fsync_fails=True)
        assert look() == "ok ok EIO ok ok 0"
        shim.disturb(control, read_only=True)
        assert look() == "EROFS ok ok ok EROFS 0"
        shim.disturb(control, clock_s=-7200)
        assert look() == "ok ok ok ok ok -2"
        shim.disturb(control)
        assert look() == "ok ok ok ok ok 0"


def test_without_a_compiler_its_kinds_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shim, "COMPILER", "no-such-gcc")
    with pytest.raises(SystemExit, match=r"no-such-gcc is missing.* or leave out fsync-fails"):
        known_kinds("clock-jumps,rank-killed")
    assert known_kinds("rank-killed,host-lost") == ["rank-killed", "host-lost"]


def test_rounds_add_up_over_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    one = Tally({"rank-killed": [3.0]}, Counter({"rank-killed": 2}), rounds=1, starts=2)
    Record(path).add(one)
    Record(path).add(Tally(struck=Counter({EARLY: 1}), rounds=1, lost=1, problems=["a is gone"]))

    total = Record(path).total

    assert total.faults == 3
    assert total.struck == {"rank-killed": 2, EARLY: 1}
    assert (total.rounds, total.starts, total.lost) == (2, 2, 1)
    assert total.recovery_s == {"rank-killed": [3.0]}
    assert total.problems == ["a is gone"]
