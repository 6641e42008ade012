"""`s3://BUCKET/PREFIX` as a storage, through boto3.

boto3 is Amazon's own client. It finds credentials and endpoint as all AWS tools do, and its errors
name S3's code, which tells a key that is not there from a bucket that is not. What is ours here is
`create`: no library says whether a conditional put whose answer was lost has won.

Source: Amazon S3, conditional writes (`If-None-Match: *` on PutObject).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from suite.disk import FULL
from suite.errors import StorageError
from suite.files import replacing
from suite.storage.base import PATIENCE_S, Storage, checked_key, visible

T = TypeVar("T")
CONNECT_S = 5.0
READ_S = 60.0
CONNECTIONS = 16
"""More than a home's copy transfers at once."""
LATER = ("RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "TooManyRequests")
"""Codes below 500 by which a server asks to be asked again."""
EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
"""Codes, of status 400, of credentials that were good once."""
# As for boto3, the variable of the one service wins over that of all.
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# A client depends on these: another value of one means another client.
SETTINGS = (*ENDPOINTS, "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_PROFILE")


class S3Storage(Storage):
    """A bucket, or a prefix in one. Credentials and endpoint come from where AWS tools look."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        super().__init__(url, patience_s=patience_s)
        if importlib.util.find_spec("boto3") is None:
            raise StorageError(
                f"storage {url}: needs boto3; install it on every host: "
                "pip install 'petl-suite[s3]'"
            )
        self._bucket, _, self._prefix = self.url.partition("://")[2].partition("/")
        if not self._bucket:
            raise StorageError(f"storage {url}: names no bucket; expected s3://BUCKET/PREFIX")

    @property
    def _client(self) -> Any:
        settings = tuple(os.environ.get(name, "") for name in SETTINGS)
        return _client(os.getpid(), settings)

    def read(self, key: str) -> bytes | None:
        def now() -> bytes | None:
            try:
                data: bytes = self._client.get_object(**self._at(key))["Body"].read()
            except _failures() as error:
                if _code(error) == "NoSuchKey":
                    return None
                raise
            return data

        return self._do(now, key)

    def write(self, key: str, data: bytes) -> None:
        self._do(lambda: self._client.put_object(**self._at(key), Body=data), key)

    def create(self, key: str, data: bytes) -> bool:
        # Whether an answer was lost: then our own bytes may be there already.
        lost = False

        def now() -> bool:
            nonlocal lost
            try:
                self._client.put_object(**self._at(key), Body=data, IfNoneMatch="*")
            except _failures() as error:
                if _code(error) == "PreconditionFailed":
                    # The bytes differ between writers, so equal ones come from our own put, whose
                    # answer was lost.
                    return lost and self.read(key) == data
                lost = lost or _is_transient(error)
                raise
            return True

        return self._do(now, key)

    def exists(self, key: str) -> bool:
        at = self._at(key)

        # S3 lists in order, so the key itself comes first. A HEAD request has no body, and could
        # not say that it is the bucket that does not exist.
        def now() -> bool:
            found = self._client.list_objects_v2(Bucket=self._bucket, Prefix=at["Key"], MaxKeys=1)
            return any(item["Key"] == at["Key"] for item in found.get("Contents", ()))

        return self._do(now, key)

    def keys(self, prefix: str = "") -> list[str]:
        start = self._name(prefix)

        def now() -> list[str]:
            pages = self._client.get_paginator("list_objects_v2")
            names: list[str] = []
            for page in pages.paginate(Bucket=self._bucket, Prefix=start):
                names += [item["Key"] for item in page.get("Contents", ())]
            return names

        found = []
        for name in self._do(now, prefix):
            # `a` finds `a` and `a/b`, and not `ab`.
            if not start or name == start or name.startswith(f"{start}/"):
                found.append(name.removeprefix(f"{self._prefix}/"))
        return visible(found)

    def delete(self, prefix: str) -> None:
        # The key itself too: listings leave out hidden ones, such as that of `check`.
        for key in {checked_key(prefix), *self.keys(prefix)}:
            at = self._at(key)
            self._do(functools.partial(self._client.delete_object, **at), key)

    def push(self, local: Path, key: str) -> None:
        def now() -> None:
            with local.open("rb") as file:
                self._client.upload_fileobj(file, **self._at(key))

        self._do(now, key)

    def pull(self, key: str, local: Path) -> None:
        def now() -> None:
            with replacing(local) as temporary, temporary.open("wb") as file:
                shutil.copyfileobj(self._client.get_object(**self._at(key))["Body"], file)

        self._do(now, key)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._name(checked_key(key))}

    def _name(self, key: str) -> str:
        """The name that a key has in the bucket; "" stands for the root."""
        parts = [self._prefix]
        if key:
            parts.append(checked_key(key))
        return "/".join(filter(None, parts))

    def _do(self, call: Callable[[], T], key: str) -> T:
        try:
            return self.patiently(call, _is_transient)
        except _failures() as error:
            # As `Storage` says.
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            raise StorageError(
                f"storage {self.url}: {key or 'listing'}: {_explained(error, self.patience_s)}"
            ) from error


@functools.lru_cache(maxsize=4)
def _client(process: int, settings: tuple[str, ...]) -> Any:
    """Make one client for all storages of a process; a fork must not share its parent's."""
    # boto3 is an extra. Homes on a disk do without it, so it is imported where it is used.
    from boto3.session import Session
    from botocore.config import Config

    # Nothing is tried again below `Storage.patiently`: only there is it known whether a lost answer
    # may have been a success.
    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        retries={"total_max_attempts": 1},
        max_pool_connections=CONNECTIONS,
    )
    return Session().client("s3", config=config)


def _failures() -> tuple[type[Exception], ...]:
    """The errors that boto3 raises, and those of the files on this side."""
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError, OSError)


def _unanswered() -> tuple[type[Exception], ...]:
    """The errors that boto3 raises where no answer came, or only a part of one."""
    from botocore import exceptions

    return (
        exceptions.HTTPClientError,
        exceptions.ConnectionError,
        exceptions.IncompleteReadError,
        exceptions.ResponseStreamingError,
    )


def _code(error: Exception) -> str:
    """S3's own name of an error; "" where no answer came."""
    return str(_answer(error).get("Error", {}).get("Code", ""))


def _status(error: Exception) -> int:
    """The HTTP status of an answer; 0 where none came."""
    return int(_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _answer(error: Exception) -> Mapping[str, Any]:
    """What the server answered; empty where no answer came, which botocore writes as None too."""
    return getattr(error, "response", None) or {}


def _is_transient(error: Exception) -> bool:
    """Whether to ask again: there was no answer, a broken one, or the server says "later".

    Not: no key, no bucket, no right, no credentials.
    """
    return isinstance(error, _unanswered()) or _status(error) >= 500 or _code(error) in LATER


def _explained(error: Exception, patience_s: float) -> str:
    """Say what went wrong, and what to do about it."""
    from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

    code = _code(error)
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return (
            "no credentials; expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, "
            "or a machine's role, on every host"
        )
    if code in EXPIRED:
        return f"refused ({code}): the credentials have expired; renew them on every host"
    if _status(error) in (401, 403):
        return f"refused ({code}); expected credentials that may list, read, write and delete there"
    if code == "NoSuchBucket":
        return "no such bucket; create it first"
    if _status(error) == 404:
        return "no such key"
    if isinstance(error, _unanswered()):
        where = next(filter(None, map(os.environ.get, ENDPOINTS)), "Amazon's endpoint")
        waited_s = max(patience_s, CONNECT_S)
        return (
            f"{where} could not be reached within {waited_s:g} s ({type(error).__name__}); "
            "check the network and AWS_ENDPOINT_URL"
        )
    # The text of an answer may hold a signed URL, which is as good as a password.
    if isinstance(error, ClientError):
        return f"{type(error).__name__} {code}"
    return f"{type(error).__name__}: {error}"
