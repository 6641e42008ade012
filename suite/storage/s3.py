"""`s3://BUCKET/PREFIX` as a storage, through s3fs.

Source: s3fs (https://s3fs.readthedocs.io); Amazon S3, conditional writes (`If-None-Match: *` on PutObject).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from suite.clock import CLOCK, Clock
from suite.errors import StorageError
from suite.files import replacing
from suite.storage.base import NO_ROOM, PATIENCE_S, Storage, checked_key, visible

T = TypeVar("T")
CONNECT_S, READ_S = 5.0, 60.0
LATER = (
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "OperationAborted",
    "ConditionalRequestConflict",
)
"""Codes by which a server asks to be asked again."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
SETTINGS = (*ENDPOINTS, "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_PROFILE")


class S3Storage(Storage):
    """A bucket, or a prefix in one; credentials and endpoint from where the AWS tools take theirs.

    s3fs and botocore try nothing again by themselves: here it is known whether a lost answer may have been a success.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S, clock: Clock = CLOCK) -> None:
        super().__init__(url, patience_s=patience_s, clock=clock)
        if importlib.util.find_spec("s3fs") is None:
            raise StorageError(
                f"storage {url}: needs s3fs; install it on every host: pip install 'petl-suite[s3]'"
            )
        self._root = self.url.partition("://")[2]
        if not self._root or self._root.startswith("/"):
            raise StorageError(f"storage {url}: names no bucket; expected s3://BUCKET/PREFIX")

    @property
    def _fs(self) -> Any:
        return _filesystem(os.getpid(), tuple(os.environ.get(name, "") for name in SETTINGS))

    def read(self, key: str) -> bytes | None:
        def now() -> bytes | None:
            try:
                data: bytes = self._fs.cat_file(self._path(key))
            except FileNotFoundError as error:
                self._blame_bucket(error)
                return None
            return data

        return self._do(now, key)

    def write(self, key: str, data: bytes) -> None:
        self._do(lambda: self._fs.pipe_file(self._path(key), data), key)

    def create(self, key: str, data: bytes) -> bool:
        lost = False  # an answer, after which our own bytes may be there

        def now() -> bool:
            nonlocal lost
            try:
                self._fs.pipe_file(self._path(key), data, mode="create")
            except _failures() as error:
                if _exists_already(error):
                    return lost and self.read(key) == data
                lost = lost or _is_transient(error)
                raise
            return True

        return self._do(now, key)

    def exists(self, key: str) -> bool:
        path = self._path(key)

        def now() -> bool:
            try:
                return bool(self._fs.info(path)["type"] == "file")
            except FileNotFoundError as error:
                self._blame_bucket(error)
                return False

        return self._do(now, key)

    def keys(self, prefix: str = "") -> list[str]:
        def now() -> list[str]:
            try:
                found = self._fs.find(self._path(prefix))
            except FileNotFoundError as error:
                self._blame_bucket(error)
                return []
            return [str(path).removeprefix(f"{self._root}/") for path in found]

        return visible(self._do(now, prefix))

    def delete(self, prefix: str) -> None:
        checked_key(prefix)

        def now() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm([self._path(key) for key in {prefix.strip("/"), *self.keys(prefix)}])

        self._do(now, prefix)

    def push(self, local: Path, key: str) -> None:
        self._do(lambda: self._fs.put_file(str(local), self._path(key)), key)

    def pull(self, key: str, local: Path) -> None:
        def now() -> None:
            with replacing(local) as temporary:
                self._fs.get_file(self._path(key), str(temporary))

        self._do(now, key)

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}" if key else self._root

    def _blame_bucket(self, error: Exception) -> None:
        """A key that is not there is an answer; a bucket that is not there is a mistake."""
        if _code(error) == "NoSuchBucket":
            raise error

    def _do(self, call: Callable[[], T], key: str) -> T:
        try:
            return self.patiently(call, _is_transient)
        except _failures() as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise
            raise StorageError(
                f"storage {self.url}: {key or 'listing'}: {_explained(error, self.patience_s)}"
            ) from error


@functools.lru_cache(maxsize=4)
def _filesystem(process: int, settings: tuple[str, ...]) -> Any:
    """One set of connections for all storages of a process; made at first use, as its thread would not survive a fork."""
    from s3fs.core import S3FileSystem

    config = {
        "connect_timeout": CONNECT_S,
        "read_timeout": READ_S,
        "retries": {"total_max_attempts": 1},
    }
    system = S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)
    system.retries = 1
    return system


def _failures() -> tuple[type[Exception], ...]:
    """What botocore, aiohttp and s3fs raise; they share no base."""
    from aiohttp import ClientError as TransferError
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError, TransferError, OSError, TimeoutError)


def _unanswered() -> tuple[type[Exception], ...]:
    """Of these, what is raised where no answer came, or a part of one."""
    from aiohttp import ClientError as TransferError
    from botocore.exceptions import ConnectionError as EndpointError
    from botocore.exceptions import HTTPClientError, IncompleteReadError, ResponseStreamingError

    return (
        HTTPClientError,
        EndpointError,
        IncompleteReadError,
        ResponseStreamingError,
        TransferError,
        TimeoutError,
        ConnectionError,
    )


def _code(error: BaseException | None) -> str:
    """S3's own name of an error, from the exception or its cause; "" where it has none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def _exists_already(error: Exception) -> bool:
    return isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412")


def _is_transient(error: Exception) -> bool:
    """Worth asking again: no answer, a broken one, or a server that says later. Not: no key, no bucket, no right, no credentials."""
    if isinstance(error, _unanswered()):
        return True
    code = _code(error)
    return code in LATER or (code.isdigit() and int(code) >= 500)


def _explained(error: Exception, patience_s: float) -> str:
    """What to do about it; the exception's own text holds no secret, but may hold a signed URL, which is left out."""
    from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return "no credentials; expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or a machine's role, on every host"
    if isinstance(error, PermissionError):
        return f"refused ({_code(error) or 'AccessDenied'}); expected credentials that may list, read, write and delete there"
    if isinstance(error, FileNotFoundError):
        return (
            "no such bucket; create it first" if _code(error) == "NoSuchBucket" else "no such key"
        )
    if isinstance(error, _unanswered()):
        where = next(filter(None, map(os.environ.get, ENDPOINTS)), "Amazon's endpoint")
        waited_s = max(patience_s, CONNECT_S)
        return f"{where} could not be reached within {waited_s:g} s ({type(error).__name__}); check the network and AWS_ENDPOINT_URL"
    return f"{type(error).__name__} {_code(error)}".strip() + (
        f": {error}" if isinstance(error, (BotoCoreError, OSError)) else ""
    )
