"""The network interface that the ranks of a group talk over. No Ray here."""

from __future__ import annotations

import os
import socket

import psutil

from suite.errors import ResourceError

LOOPBACK = "127.0.0.1"


def interfaces() -> dict[str, str]:
    """The IPv4 address of every network interface of this host that is up and has one, by name."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        (name, a.address)
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
        for a in addresses
        if a.family == socket.AF_INET
    ]
    return dict(reversed(found))  # the first of several addresses


def choose(name: str | None, *, address: str) -> tuple[str | None, str]:
    """The interface for a group that spans hosts, and its address here.

    Left to itself, gloo takes the address that the host's own name resolves to, which is often 127.0.1.1 and reaches nobody.

    Args:
        name: As configured, or else as GLOO_SOCKET_IFNAME says (the first it names); None = the one that holds `address`.
        address: Of this host in the cluster.

    Returns:
        The name, None where `address` is on no interface (a host behind address translation), and the address.

    Raises:
        ResourceError: There is no such interface.
    """
    known = interfaces()
    if name is not None:
        os.environ.pop("NCCL_SOCKET_IFNAME", None)  # overruled
    name = name or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or None
    if name is None:
        return next((n for n, held in known.items() if held == address), None), address
    if name not in known:
        raise ResourceError(
            f"resources.interface: got {name!r}, expected an interface of {socket.gethostname()}: {', '.join(known)}"
        )
    return name, known[name]


def use(name: str | None) -> None:
    """Have gloo and NCCL of this process talk over an interface; a choice for NCCL that was made by its own variable stands."""
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def use_loopback() -> None:
    """Have gloo of this process talk within this host; NCCL finds its way there by itself."""
    name = next((n for n, held in interfaces().items() if held == LOOPBACK), None)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def free_port() -> int:
    """A TCP port that nobody listens on at any address of this host just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
