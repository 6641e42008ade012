"""Homes that their reader cannot write: on a read-only mount, and of another user."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from suite.errors import ResourceError
from suite.plan.preflight import check_home
from suite.record.folder import Home
from suite.tracking import sync
from tests.answers import some_right, write_confirmed
from tests.commands import ROOT
from tests.records import define
from tests.trained import trained_spec, write_trained

NOBODY = "65534"
READ = """
import json, sys
from pathlib import Path
from suite.cli.app import main
from suite.tracking import open_store

for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        print("CODE", words[0], ended.code)
for path in sys.argv[2:]:
    print("STORE", Path(path).parent.name, *open_store(f"sqlite:///{path}", create=False).experiments())
"""


def test_a_home_that_is_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "not-mounted")
    with pytest.raises(ResourceError, match=r"link: a link to .*not-mounted, which is not there"):
        check_home(Home(link))


@pytest.mark.parametrize("part", ["trials", "sweeps", "pretrained"])
def test_a_home_whose_trials_are_not_mounted_is_not_an_empty_one(tmp_path: Path, part: str) -> None:
    home = Home(tmp_path)
    check_home(home)
    (tmp_path / part).symlink_to(tmp_path / "not-mounted")
    with pytest.raises(ResourceError, match=f"{part}: is no folder, or a link that leads nowhere"):
        check_home(home)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users may enter, as pytest's own may not be."""
    folder = Path(tempfile.mkdtemp(prefix="suite-unwritable-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def home(place: Path, empty_db: Path) -> Home:
    """A sweep with answers, a model to export, and databases as writers leave them."""
    home = Home(place / "home")
    rng = np.random.default_rng(0)
    for method, share in (("full", 0.9), ("lora", 0.6)):
        write_confirmed(home, method, some_right(rng, [share, share], items=60))
    define(home)
    folder, _ = write_trained(home, trained_spec("lora", "bert", seed=1, sweep="trained"))
    # As a trial leaves it: safetensors by itself lets nobody else read.
    folder.best.chmod(0o644)
    (home.path / "sweeps" / "demo.driver").write_text('{"pid": 4711}')
    shutil.copy(empty_db, home.path / "mlflow.db")
    assert sync(home, tracking_uri=home.tracking_uri, sweep="demo").unreachable is None
    return home


def reader(how: str, home: Path) -> list[str]:
    """What a command begins with so that it cannot write the home."""
    if os.geteuid() == 0 and how == "another user":
        return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if os.geteuid() == 0:
        mounts = f"mount --bind {home} {home} && mount -o remount,ro,bind {home}"
        return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    if how == "another user":
        subprocess.run(["chmod", "-R", "a-w", str(home)], check=True)
        return []
    pytest.skip("only root may mount")


@pytest.mark.parametrize(
    "how", ["read-only mount", pytest.param("another user", marks=pytest.mark.slow)]
)
def test_every_command_that_reads_works(how: str, home: Home, place: Path) -> None:
    out = place / "out"
    out.mkdir()
    out.chmod(0o777)
    stores = {}
    for name in ("quiet", "live", "killed", "no-index"):
        (home.path / name).mkdir()
        stores[name] = home.path / name / "mlflow.db"
    with closing(sqlite3.connect(home.path / "mlflow.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for name in ("quiet", "live"):
        shutil.copy(home.path / "mlflow.db", stores[name])
    commands = [
        ["status"],
        ["leaderboard"],
        ["report", "--sweep", "demo", "--out", out / "report"],
        ["compare", "full", "lora", "--sweep", "demo"],
        ["curves", "lora/agreement"],
        ["export-results", out / "results.json"],
        ["export", "lora/agreement", out / "model", "--sweep", "trained"],
    ]
    if how == "read-only mount":
        # The others read trial folders, whoever may not write them.
        commands = [words for words in commands if words[0] in ("status", "leaderboard", "report")]
    given = [[str(word) for word in (*words, "--home", home.path)] for words in commands]
    # The row is in the log alone, as long as the writer has not merged it.
    with closing(sqlite3.connect(stores["live"])) as writer:
        writer.execute("UPDATE experiment_tags SET value = 'renamed' WHERE key = 'suite.sweep'")
        writer.commit()
        for part in ("", "-wal", "-shm"):
            shutil.copy(f"{stores['live']}{part}", f"{stores['killed']}{part}")
        for part in ("", "-wal"):
            shutil.copy(f"{stores['live']}{part}", f"{stores['no-index']}{part}")
        try:
            with FileLock(home.path / "sweeps" / "demo.lock"):
                read = subprocess.run(
                    [*reader(how, home.path), sys.executable, "-c", READ, json.dumps(given)]
                    + [str(path) for path in stores.values()],
                    capture_output=True,
                    text=True,
                    cwd=out,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(out)}
                    | {"XDG_CACHE_HOME": str(out / "cache"), "MPLCONFIGDIR": str(out)},
                    check=False,
                )
        finally:
            subprocess.run(["chmod", "-R", "u+w", str(home.path)], check=True)
    said = read.stdout + read.stderr
    codes = [line for line in read.stdout.splitlines() if line.startswith("CODE")]
    assert codes == [f"CODE {words[0]} 0" for words in commands], said
    assert "sweep demo: running, process 4711" in read.stdout
    assert "STORE quiet demo" in read.stdout, said
    for name in ("live", "killed", "no-index"):
        assert f"STORE {name} renamed" in read.stdout, said
