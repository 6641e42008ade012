"""Keys below a folder or a bucket: whole or not at all, and one winner where many create."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, ReadTimeoutError
from moto.server import ThreadedMotoServer

from suite.cli.export import _check_new, _folder_for
from suite.errors import ConfigError, StorageError
from suite.storage import base
from suite.storage.base import PATIENCE_S, Storage, checked_key
from suite.storage.s3 import S3Storage
from suite.storage.urls import open_storage
from tests.buckets import BUCKET, s3_server
from tests.clocks import FakeClock
from tests.ports import free_port

__all__ = ["s3_server"]


@pytest.fixture(params=["file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A fresh root of either kind."""
    if request.param == "file":
        return open_storage(f"file://{tmp_path}/root")
    request.getfixturevalue("s3_server")
    return open_storage(f"s3://{BUCKET}/{tmp_path.name}")


def test_what_is_written_is_read_and_what_is_not_there_is_none(storage: Storage) -> None:
    assert storage.read("a/b") is None and not storage.exists("a/b")
    storage.write("a/b", b"one")
    storage.write("a/b", b"two")
    assert storage.read("a/b") == b"two" and storage.exists("a/b")
    assert storage.read("a") is None and not storage.exists("a")


def test_keys_are_listed_below_whole_names_only(storage: Storage) -> None:
    for key in ("a/b", "a/c/d", "ab/e"):
        storage.write(key, b"x")
    assert storage.keys() == ["a/b", "a/c/d", "ab/e"]
    assert storage.keys("a") == storage.keys("a/") == ["a/b", "a/c/d"]
    assert storage.keys("a/b") == ["a/b"] and storage.keys("nothing") == []


def test_what_is_hidden_is_no_key(storage: Storage) -> None:
    for key in ("a/.b", ".a/b", "a/b"):
        storage.write(key, b"x")
    assert storage.keys() == ["a/b"]


def test_deleting_takes_a_key_or_all_below_it_and_forgives_what_is_gone(storage: Storage) -> None:
    for key in ("a/b", "a/c/d", "ab/e"):
        storage.write(key, b"x")
    storage.delete("a")
    assert storage.keys() == ["ab/e"]
    storage.delete("ab/e")
    storage.delete("ab/e")
    assert storage.keys() == []


def test_a_file_comes_back_as_it_was_pushed(storage: Storage, tmp_path: Path) -> None:
    data = os.urandom(3 * 2**20)
    (tmp_path / "one").write_bytes(data)
    storage.push(tmp_path / "one", "deep/er/one")
    storage.pull("deep/er/one", tmp_path / "new" / "two")
    assert (tmp_path / "new" / "two").read_bytes() == data


def test_a_pull_that_fails_leaves_the_old_file_and_no_other(
    storage: Storage, tmp_path: Path
) -> None:
    kept = tmp_path / "kept" / "file"
    kept.parent.mkdir()
    kept.write_bytes(b"old")
    with pytest.raises(StorageError, match=r"missing"):
        storage.pull("missing", kept)
    assert kept.read_bytes() == b"old" and os.listdir(kept.parent) == ["file"]


@pytest.mark.slow
def test_of_twenty_who_create_a_key_exactly_one_wins(storage: Storage) -> None:
    for round_ in range(5):
        start = threading.Barrier(20)
        won = []

        def contend(
            name: int,
            start: threading.Barrier = start,
            won: list[int] = won,
            key: str = f"leases/s/{round_}",
        ) -> None:
            start.wait()
            if storage.create(key, f"claim of {name}".encode()):
                won.append(name)

        threads = [threading.Thread(target=contend, args=(name,)) for name in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert storage.read(f"leases/s/{round_}") == f"claim of {won[0]}".encode()


def test_a_storage_that_works_passes_its_check_and_keeps_nothing_of_it(storage: Storage) -> None:
    storage.check()
    assert storage.keys() == []


@pytest.mark.parametrize("key", ["../up", "a/../../up", "a//b", ".", "a\\b", ""])
def test_a_key_that_could_leave_the_root_is_refused(key: str) -> None:
    with pytest.raises(StorageError, match="leaves its folder"):
        checked_key(key)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host/x", "expected a folder, file:// or s3://"),
        ("s3://key:hidden@bucket/x", "AWS_ACCESS_KEY_ID"),
        ("file://host/x", "file:///ABSOLUTE/PATH"),
        ("s3:///x", "names no bucket"),
        ("s3:/bucket/x", "s3://BUCKET/PREFIX"),
        ("", "expected a folder"),
    ],
)
def test_a_url_that_cannot_be_used_says_what_can(url: str, says: str) -> None:
    with pytest.raises(StorageError, match=says) as caught:
        open_storage(url)
    assert "hidden" not in str(caught.value)


def test_a_folder_may_have_a_colon_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_storage(Path("a:b")).create("key", b"value")
    assert open_storage(tmp_path / "a:b").read("key") == b"value"


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StorageError, match=r"petl-suite\[s3\]"):
        open_storage("s3://bucket/x")


class Cut:
    """A client of boto3 whose calls lose their connection a number of times."""

    def __init__(self, client: Any, times: float) -> None:
        self._client = client
        self._times = times

    def __getattr__(self, name: str) -> Any:
        if self._times > 0:
            self._times -= 1
            raise ReadTimeoutError(endpoint_url="http://storage")
        return getattr(self._client, name)


@pytest.mark.parametrize("name", ["read", "write", "create", "exists", "keys", "push", "pull"])
def test_a_connection_that_is_cut_is_asked_again_and_at_last_told(
    name: str, s3_server: ThreadedMotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"s3://{BUCKET}/cut-{name}")
    storage.write("there", b"value")
    (tmp_path / "file").write_bytes(b"value")
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: storage.read("there"),
        "write": lambda: storage.write("new", b"value"),
        "create": lambda: storage.create("new", b"value"),
        "exists": lambda: storage.exists("there"),
        "keys": lambda: storage.keys("there"),
        "push": lambda: storage.push(tmp_path / "file", "new"),
        "pull": lambda: storage.pull("there", tmp_path / "new"),
    }
    expected = {"read": b"value", "create": True, "exists": True, "keys": ["there"]}
    client = storage._client  # type: ignore[attr-defined]
    cut = Cut(client, 1)
    monkeypatch.setattr(S3Storage, "_client", cut)
    assert calls[name]() == expected.get(name)
    cut._times = math.inf
    with storage.asked_once(), pytest.raises(StorageError, match="could not be reached"):
        calls[name]()


def test_credentials_that_have_expired_are_told(
    s3_server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: Any) -> Any:
        raise ClientError({"Error": {"Code": "ExpiredToken"}}, "PutObject")

    monkeypatch.setattr(S3Storage, "_client", SimpleNamespace(put_object=refused))
    with pytest.raises(StorageError, match=r"ExpiredToken.*renew them on every host"):
        open_storage(f"s3://{BUCKET}/x").write("key", b"value")


def test_who_waits_for_a_storage_is_told_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(base, "CLOCK", clock)
    monkeypatch.setattr(base, "_said_s", -math.inf)

    def away() -> None:
        if clock.now_s() < 1150:
            raise OSError("cut")

    storage = open_storage(tmp_path, patience_s=300.0)
    storage.patiently(away, lambda _: True)
    assert len(caplog.messages) == 3
    # After 10 s of silence and a pause of at most 5 s, which is drawn at random.
    assert re.search(
        r"does not answer \(OSError\): waiting up to 2(8[5-9]|90) s for it", caplog.messages[0]
    )


def test_a_bucket_that_is_not_there_is_named(s3_server: ThreadedMotoServer) -> None:
    storage = open_storage("s3://no-such-bucket/x")
    for call in (
        storage.check,
        storage.keys,
        lambda: storage.read("a"),
        lambda: storage.exists("a"),
        lambda: storage.write("a", b""),
    ):
        with pytest.raises(StorageError, match="no such bucket; create it"):
            call()


def test_missing_credentials_are_said_to_be_missing(
    s3_server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StorageError, match="no credentials; expected AWS_ACCESS_KEY_ID"):
        open_storage(f"s3://{BUCKET}/x").check()


def test_an_endpoint_where_nobody_listens_is_told_within_seconds(
    s3_server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    with pytest.raises(StorageError, match="could not be reached"):
        open_storage(f"s3://{BUCKET}/x").check()
    # A check does not wait for it; half of that leaves a busy machine its time.
    assert time.monotonic() - began < PATIENCE_S / 2


def test_a_storage_that_is_away_for_a_while_is_waited_for(
    s3_server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    late = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)

    def come_back() -> None:
        time.sleep(1.0)
        late.start()

    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        assert open_storage(f"s3://{BUCKET}/away", patience_s=60.0).create(
            "claim", b"mine"
        )  # moto's buckets are this process's
    finally:
        thread.join()
        late.stop()


def test_a_root_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(StorageError, match="can be read and written"):
        open_storage(tmp_path / "root").check()


def test_an_export_to_a_url_is_put_whole_and_its_description_last(
    s3_server: ThreadedMotoServer, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/model"
    with _folder_for(url) as folder:
        (folder / "tokenizer").mkdir(parents=True)
        for name in ("model.safetensors", "suite.json", "tokenizer/vocab.txt", "zebra.txt"):
            (folder / name).write_text(name)
    storage = open_storage(url)
    assert storage.keys() == ["model.safetensors", "suite.json", "tokenizer/vocab.txt", "zebra.txt"]
    assert storage.read("tokenizer/vocab.txt") == b"tokenizer/vocab.txt"
    times = {
        item["Key"].rpartition("/")[2]: item["LastModified"]
        for item in boto3.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]
    }
    assert max(times, key=lambda name: (times[name], name == "suite.json")) == "suite.json"
    with pytest.raises(ConfigError, match="not empty"):
        _check_new(url)


def test_an_export_that_fails_puts_nothing(s3_server: ThreadedMotoServer, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/model"

    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"), _folder_for(url) as folder:
        fail(folder)
    assert open_storage(url).keys() == []


def test_a_disk_without_hard_links_is_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_source: str, _target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match="mine: this disk has no hard links"):
        open_storage(tmp_path / "root").create("mine", b"mine")


def test_a_file_that_was_made_although_the_disk_lost_the_answer_is_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    lost = []

    def lose_one(source: str, target: Path) -> None:
        link(source, target)
        if not lost:
            lost.append(target)
            raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "link", lose_one)
    storage = open_storage(tmp_path / "root")
    assert storage.create("mine", b"mine") and lost
    lost.clear()
    storage.write("theirs", b"theirs")
    assert not storage.create("theirs", b"mine")


def test_an_export_that_breaks_on_its_way_can_be_repeated(
    s3_server: ThreadedMotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/model"
    kind = type(open_storage(url))
    push = kind.push

    def breaks(self: Storage, local: Path, key: str) -> None:
        push(self, local, key)
        if key == "b":
            raise StorageError("the line is cut")

    def write(folder: Path) -> None:
        folder.mkdir()
        for name in "abc":
            (folder / name).write_text(name)

    monkeypatch.setattr(kind, "push", breaks)
    with pytest.raises(StorageError, match="cut"), _folder_for(url) as folder:
        write(folder)
    _check_new(url)
