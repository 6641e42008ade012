"""An S3 server in this process with one bucket, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "suite-tests"


@contextmanager
def running(
    server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ThreadedMotoServer]:
    """With one bucket; credentials and endpoint are in the environment, as on a cluster."""
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


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    """On a free port of this machine."""
    with running(
        ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False), monkeypatch
    ) as server:
        yield server
