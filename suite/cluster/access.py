"""Who may reach a Ray cluster.

A local cluster listens on loopback alone; a running one must ask for a token. Whoever reaches a Ray
cluster without authentication can run code on it and read what is sent to it.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray.tune.execution import class_cache

from suite.config.variables import environment
from suite.errors import ResourceError
from suite.redact import is_secret_name, redact

ANSWER_S = 10.0
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""The first call that everybody makes to a head."""
TLS_FILES = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
"""Ray's variables that name its certificate authority, key and certificate, in gRPC's order."""


@contextmanager
def loopback_only() -> Iterator[None]:
    """Have Ray listen on 127.0.0.1 alone, in this process and those that it starts.

    By itself it listens on every interface.
    """
    # Ray has this mode for macOS and Windows, whose firewalls ask about open ports. There is no
    # option for it: ray.init replaces 127.0.0.1 as `_node_ip_address` by the host's address, and
    # its variable was read when Ray was imported.
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def make_token() -> None:
    """Make the file with Ray's token before Ray does, who would let everybody read it.

    A file that is there keeps its token, and loses the rights of others. Nothing is done where Ray
    is told of another token, or to ask for none.
    """
    # A local cluster asks for a token unless this says otherwise.
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Of two processes that do this at once, the first one's token counts for both.
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))  # 256 bits, as Ray's own
    if path.stat().st_uid == os.getuid():
        path.chmod(0o600)


@contextmanager
def tune_keeps_secrets() -> Iterator[None]:
    """Keep Tune from handing this process's AWS keys to its trials.

    They would stand among the arguments of the trials' processes, for all to read.
    Workers have what their own machine's environment or files give them.
    """
    handed_on = class_cache.ENV_VARS_TO_PROPAGATE
    class_cache.ENV_VARS_TO_PROPAGATE = {name for name in handed_on if not is_secret_name(name)}
    try:
        yield
    finally:
        class_cache.ENV_VARS_TO_PROPAGATE = handed_on


@contextmanager
def ray_says_nothing() -> Iterator[None]:
    """Silence Ray's loggers: the suite says what there is to say."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def require_token(address: str) -> None:
    """Check that a running cluster asks for a token, and let this process show its own.

    Args:
        address: `HOST:PORT` of the head, `auto`, or `http(s)://HOST:PORT` of its dashboard.

    Raises:
        ResourceError: The cluster lets anyone in, does not answer, or wants a token that this
            machine has not.
    """
    if address.startswith("ray://"):
        raise ResourceError(
            f"--address {address}: a sweep's driver runs inside the cluster;"
            " there give HOST:PORT or auto, from elsewhere use suite submit"
        )
    if not asks_for_token(address):
        raise ResourceError(
            f"--address {redact(address)}: this Ray cluster asks for no token,"
            " so whoever reaches it can run code on it; start it with RAY_AUTH_MODE=token"
            " on every node (docs/security.md), or accept that with --insecure"
        )
    # Ray reads RAY_AUTH_MODE when it is imported, and only this call has it look for a token again.
    with ray_says_nothing():
        shows_token = maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if not shows_token:
        start = f"--address {redact(address)}: this Ray cluster asks for a token, and"
        mode = os.environ.get("RAY_AUTH_MODE", "token")
        # In another mode Ray shows none, whatever this machine has.
        if mode != "token":
            raise ResourceError(f"{start} RAY_AUTH_MODE is {mode!r} here; unset it")
        raise ResourceError(
            f"{start} this machine has none; copy the head's ~/.ray/auth_token here (readable by"
            " you alone), or name it with RAY_AUTH_TOKEN_PATH"
        )


def asks_for_token(address: str) -> bool:
    """Whether a running cluster refuses everybody without a token; `address` as in `require_token`.

    Raises:
        ResourceError: Nothing answers there.
    """
    if address.startswith(("http://", "https://")):
        return _dashboard_asks(address)
    return _head_asks(address)


def _head_asks(address: str) -> bool:
    """Call the head without a token: only one that asks for none answers."""
    try:
        # What "auto" means must be what `ray.init` makes of it, else another cluster would be
        # checked than is joined.
        target = services.canonicalize_bootstrap_address_or_die(address)
    except (ConnectionError, ValueError) as error:
        raise ResourceError(
            f"--address {address}: no Ray cluster: {error};"
            " start one with `ray start`, or leave --address out"
        ) from error
    with _channel(target) as channel:
        call: Any = channel.unary_unary(
            ALIVE, request_serializer=bytes, response_deserializer=bytes
        )
        try:
            # A head that is just starting refuses connections, and this waits until it does not.
            call(b"", timeout=ANSWER_S, wait_for_ready=True)
        except grpc.RpcError as error:
            status: Any = error
            if status.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise ResourceError(
                f"--address {address}: no Ray cluster answers at {target} within {ANSWER_S:g} s"
                f" ({status.code().name.lower()});"
                " start one with `ray start`, or leave --address out"
            ) from None
    return False


def _channel(target: str) -> Any:
    """A gRPC channel, encrypted where Ray's own are.

    Made here, because a channel of Ray's would show the token.
    """
    made: Any = grpc
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return made.insecure_channel(target)
    contents = []
    for variable in TLS_FILES:
        try:
            contents.append(Path(os.environ[variable]).read_bytes())
        except (KeyError, OSError) as error:
            raise ResourceError(
                f"RAY_USE_TLS is set, but {variable} names no file that can be read: {error}"
            ) from None
    return made.secure_channel(target, made.ssl_channel_credentials(*contents))


def _dashboard_asks(url: str) -> bool:
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/api/jobs/")  # noqa: S310 - http(s), as the caller checks
        with urllib.request.urlopen(request, timeout=ANSWER_S):  # noqa: S310
            return False
    except urllib.error.HTTPError as error:
        # Any other code comes from a server that is no dashboard of Ray.
        if error.code in (401, 403):
            return True
        raise ResourceError(
            f"--address {redact(url)}: no Ray dashboard: it answers {error.code}"
        ) from None
    # A bracket or a port that is none is a ValueError, or an InvalidURL.
    except (OSError, ValueError, http.client.InvalidURL) as error:
        raise ResourceError(
            f"--address {redact(url)}: no Ray dashboard answers there: {redact(error)}"
        ) from None
