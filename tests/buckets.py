"""An S3 server in this process with one bucket, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import pytest
from moto.core.common_types import TYPE_RESPONSE
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

BUCKET = "suite-tests"


@contextmanager
def running(
    server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ThreadedMotoServer]:
    """With one bucket; credentials and endpoint are in the environment, as on a cluster."""
    _put_one_at_a_time(monkeypatch)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    yield server
    server.stop()


def _put_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a real bucket does: moto's threads look for a key and put it in two steps."""
    lock = threading.Lock()
    put_object = S3Response.put_object

    def locked(self: S3Response) -> TYPE_RESPONSE:
        with lock:
            return put_object(self)

    monkeypatch.setattr(S3Response, "put_object", locked)


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    """On a free port of this machine."""
    with running(
        ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False), monkeypatch
    ) as server:
        yield server
