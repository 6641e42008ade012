"""A disk that fails: what is said of it, whose it is, and what is left behind."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ray.exceptions import RayTaskError

from suite.disk import fault_of, os_error_in, said
from suite.files import write_json
from suite.train.checkpoint import write_tensors
from suite.train.failure import is_infrastructure
from tests.commands import Suite, suite
from tests.records import make_home

__all__ = ["suite"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system lets this process write 4 KiB to a file, and no byte more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_weights_that_a_disk_does_not_take_are_the_machines_failure_not_the_trials(
    tmp_path: Path,
) -> None:
    """safetensors raises its own exception, which once ended trials as `failed`, for good."""
    path = tmp_path / "best.safetensors"
    with pytest.raises(OSError, match="File too large") as caught:
        write_tensors(path, {"weight": torch.zeros(4096)})
    assert is_infrastructure(caught.value)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert not list(tmp_path.iterdir()), "nothing half written is left"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES])
def test_an_error_of_a_sync_names_the_file_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    path = tmp_path / "result.json"
    path.write_text("the old one")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is what is asked
        write_json(path, 1)
    assert said(caught.value).startswith(f"{os.strerror(number)} ({path}); ")
    assert fault_of(caught.value, tmp_path) == said(caught.value)
    # As it comes from a rank, and as Tune tells of it.
    wrapped = RayTaskError("epoch", "a traceback", pickle.loads(pickle.dumps(caught.value)))
    for error in (wrapped, RuntimeError(f"OSError: {caught.value}")):
        assert fault_of(error, tmp_path) == said(caught.value)
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "the old one"


def test_only_the_homes_own_disk_and_full_ones_stop_a_sweep(tmp_path: Path) -> None:
    def told(number: int, path: str | None) -> str:
        error = OSError(number, os.strerror(number))
        error.filename = path
        return fault_of(error, tmp_path)

    inside = str(tmp_path / "trials" / "x")
    assert told(errno.EACCES, inside) and told(errno.EIO, None) and told(errno.ENOSPC, "/else")
    # Another host may read its own copy of the data, and sockets have errors of their own.
    assert not told(errno.EACCES, "/data/train.parquet")
    assert not told(errno.ETIMEDOUT, None) and not told(errno.ECONNRESET, None)
    assert not told(errno.ENOENT, inside)
    assert os_error_in(ValueError("no number")) is None


def test_a_command_ends_in_one_line_that_says_what_failed(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path)
    folder = home.path / "trials"
    listed = os.listdir

    def refuse(path: str | Path) -> list[str]:
        if Path(path) == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    code, _, err = suite("status", "--home", str(home.path))
    assert code == 1
    assert err.splitlines()[-1].startswith(f"error: Input/output error ({home.path}")
    assert "dmesg" in err and "give the same command again" in err and "Traceback" not in err
