"""The network interface that the ranks of a group talk over. No Ray here."""

from __future__ import annotations

import os
import socket

import psutil

from suite.errors import ResourceError

LOOPBACK = "127.0.0.1"


def interfaces() -> dict[str, str]:
    """The first IPv4 address of every network interface of this host that is up, by name."""
    state = psutil.net_if_stats()
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        if name not in state or not state[name].isup:
            continue
        for address in addresses:
            if address.family == socket.AF_INET:
                found.setdefault(name, address.address)
    return found


def _holder_of(address: str) -> str | None:
    """The interface that holds an address; None = it is on no interface."""
    for name, held in interfaces().items():
        if held == address:
            return name
    return None


def choose(name: str | None, *, address: str) -> tuple[str | None, str]:
    """The interface for a group that spans hosts, and its address here.

    Left to itself, gloo takes the address that the host's own name resolves to, which is often
    127.0.1.1 and reaches nobody.

    Args:
        name: As configured; None = the first that GLOO_SOCKET_IFNAME names, else the one that holds
            `address`.
        address: This host's address in the cluster.

    Returns:
        The name, None if `address` is on no interface (a host behind address translation), and the
        address.

    Raises:
        ResourceError: There is no such interface.
    """
    if name is not None:
        os.environ.pop("NCCL_SOCKET_IFNAME", None)  # the sweep's own choice stands above it
    name = name or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not name:
        return _holder_of(address), address
    known = interfaces()
    if name not in known:
        raise ResourceError(
            f"resources.interface: got {name!r}, expected an interface of {socket.gethostname()}:"
            f" {', '.join(known)}"
        )
    return name, known[name]


def use(name: str | None) -> None:
    """Have gloo and NCCL of this process talk over an interface.

    A choice that NCCL's own variable makes stands.
    """
    if name is not None:  # else gloo and NCCL find one for themselves
        os.environ["GLOO_SOCKET_IFNAME"] = name
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def use_loopback() -> None:
    """Have gloo and NCCL of this process talk and listen within this host."""
    use(_holder_of(LOOPBACK))


def free_port() -> int:
    """A TCP port that nobody listens on at any address of this host just now."""
    with socket.socket() as probe:
        # For port 0 the kernel chooses one that is free.
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
