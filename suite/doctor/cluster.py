"""What a Ray cluster can do, asked of every node by a process of its own there."""

from __future__ import annotations

import contextlib
import os
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.worker import get_dashboard_url
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from suite.cluster.access import asks_for_token, require_token
from suite.cluster.session import cluster
from suite.doctor.finding import Finding, Level, fail, merge_nodes, ok, run_checks, warn
from suite.doctor.install import TOKEN_REMEDY
from suite.doctor.join import check_join
from suite.doctor.machine import machine_checks
from suite.doctor.places import home_writable, storage
from suite.errors import ResourceError
from suite.record.provenance import git_state, versions
from suite.redact import redact
from suite.storage.urls import is_local, open_storage

ANSWER_S = 120.0
VISIBLE_S = 10.0
"""How long a file may take to be seen by another node: network file systems keep what they know of a folder for seconds."""
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0
ROUND_TRIPS = 5
REVISION = "revision of the suite"


class Probe:
    """A process on one node."""

    def findings(self, home: str, url: str | None) -> list[Finding]:
        """The checks of a single machine, and of the places it writes to."""
        checks = [*machine_checks(Path(home)), ("home", lambda: home_writable(Path(home)))]
        return run_checks(checks if url is None else [*checks, ("storage", lambda: storage(url))])

    def versions(self) -> dict[str, str | None]:
        state = git_state()
        revision = (
            "not a git checkout"
            if state["revision"] is None
            else state["revision"][:12] + (", edited" if state["dirty"] else "")
        )
        return {**versions(), REVISION: revision}

    def now_s(self) -> float:
        return time.time()

    def seen(self, path: str, text: str) -> bool:
        """Whether this node has that file with that text, soon."""
        return _appears(Path(path), text)

    def leave(self, path: str, text: str) -> str | None:
        """Write a file; returns why it cannot."""
        try:
            Path(path).write_text(text)
        except OSError as error:
            return error.strerror or str(error)
        return None


@dataclass(frozen=True, slots=True)
class Node:
    """A node and the process there; `label` is its address, with the beginning of its id where several share one."""

    id: str
    label: str
    address: str
    gpus: int
    probe: Any


def check_cluster(address: str | None, *, home: Path, url: str | None = None) -> list[Finding]:
    """Everything that takes Ray to find out.

    Args:
        address: A running cluster ("auto" finds one here); None = start a local one for it.
        home: Where a sweep would live.
        url: Storage behind the home.
    """
    try:
        if address is not None and asks_for_token(address):  # that one asks for none is a finding
            require_token(address)
        with cluster(address, threads=1):
            return _check(home, url, local=address is None)
    except ResourceError as error:
        return [
            fail("cluster", found=str(error), remedy="ray status on the head shows whether it runs")
        ]


def _check(home: Path, url: str | None, *, local: bool) -> list[Finding]:
    alive, dead = [n for n in ray.nodes() if n["Alive"]], [n for n in ray.nodes() if not n["Alive"]]
    what = ", ".join(
        f"{amount:g} {name}"
        for name, amount in sorted(ray.cluster_resources().items())
        if name in ("CPU", "GPU")
    )
    size = f"{len(alive)} node{'s' if len(alive) > 1 else ''}, {what}, Ray {ray.__version__}"
    found = [ok("cluster", found=f"a local one starts: {size}" if local else size)]
    if dead:
        lost = ", ".join(sorted({n["NodeManagerAddress"] for n in dead}))
        found.append(
            warn(
                "cluster",
                found=f"nodes that have gone: {lost}",
                remedy="ray start them again, unless they were meant to go",
            )
        )
    with _probes(alive) as nodes:
        answering, silent = _answering(nodes)
        found += silent
        if answering:
            found += run_checks(
                [
                    ("nodes", lambda: _each(answering, home, url, local=local)),
                    ("versions", lambda: check_versions(_ask(answering, "versions"))),
                    ("clocks", lambda: _clocks(answering)),
                    ("shared home", lambda: _shared_home(answering, home, url)),
                    (
                        "join",
                        lambda: check_join([(n.id, n.label, n.address, n.gpus) for n in answering]),
                    ),
                    ("tokens", lambda: _tokens(local=local)),
                    ("dashboard", _dashboard),
                ]
            )
    return found


@contextmanager
def _probes(alive: Sequence[Mapping[str, Any]]) -> Iterator[list[Node]]:
    addresses = [n["NodeManagerAddress"] for n in alive]
    actor: Any = ray.remote(Probe)
    nodes = []
    for n in alive:
        address = n["NodeManagerAddress"]
        label = address if addresses.count(address) == 1 else f"{address} ({n['NodeID'][:6]})"
        place = NodeAffinitySchedulingStrategy(n["NodeID"], soft=False)
        probe = actor.options(num_cpus=0, scheduling_strategy=place).remote()
        nodes.append(Node(n["NodeID"], label, address, int(n["Resources"].get("GPU", 0)), probe))
    try:
        yield nodes
    finally:
        for node in nodes:
            with contextlib.suppress(RayError):
                ray.kill(node.probe, no_restart=True)


def _answering(nodes: Sequence[Node]) -> tuple[list[Node], list[Finding]]:
    """Nodes where a process of the suite runs, and what is wrong with the others."""
    refs = {node.label: node.probe.now_s.remote() for node in nodes}
    end = time.monotonic() + ANSWER_S
    good, bad = [], []
    for node in nodes:
        try:
            ray.get(refs[node.label], timeout=max(0.1, end - time.monotonic()))
            good.append(node)
        except GetTimeoutError:
            found, remedy = (
                f"no process started there within {ANSWER_S:g} s",
                "look at that node's load and its raylet.out",
            )
            bad.append(fail("nodes", found=found, remedy=remedy, node=node.label))
        except RayError as error:
            found = f"a process of the suite cannot run there: {str(error).strip().splitlines()[-1][:300]}"
            bad.append(
                fail(
                    "nodes",
                    found=found,
                    remedy="install this checkout there, with the same constraints.txt",
                    node=node.label,
                )
            )
    return good, bad


def _ask(nodes: Sequence[Node], method: str, *arguments: Any) -> dict[str, Any]:
    """One answer per node, by its label."""
    refs = [getattr(node.probe, method).remote(*arguments) for node in nodes]
    return dict(zip((node.label for node in nodes), ray.get(refs, timeout=ANSWER_S), strict=True))


def _each(nodes: Sequence[Node], home: Path, url: str | None, *, local: bool) -> list[Finding]:
    """The checks of single machines; a local cluster's only node was looked at already."""
    if local:
        return []
    answers = _ask(nodes, "findings", str(home), url)
    return merge_nodes(
        [replace(finding, node=label) for label, found in answers.items() for finding in found],
        len(nodes),
    )


def check_versions(by_node: Mapping[str, Mapping[str, str | None]]) -> list[Finding]:
    """Equal versions of everything that can change a number, on all nodes.

    Args:
        by_node: Package -> version, by node.
    """
    found = []
    for package in dict.fromkeys(name for its in by_node.values() for name in its):
        nodes: dict[str | None, list[str]] = {}
        for node, its in by_node.items():
            nodes.setdefault(its.get(package), []).append(node)
        if len(nodes) > 1:
            text = f"{package}: " + "; ".join(
                f"{version or 'absent'} on {', '.join(where)}" for version, where in nodes.items()
            )
            found.append(
                fail(
                    "versions",
                    found=text,
                    remedy="install the same checkout and constraints.txt on every node",
                )
            )
    first = next(iter(by_node.values()))
    shown = ", ".join(
        f"{name} {first.get(name)}"
        for name in ("python", "torch", "deepspeed", "transformers", "ray", REVISION)
    )
    return found or [ok("versions", found=f"the same on all nodes: {shown}")]


def _clocks(nodes: Sequence[Node]) -> list[Finding]:
    """Each node's clock against this one's: half a round trip is all that can be wrong with it."""
    offsets = {node.label: _offset(node) for node in nodes}
    bad = [
        f
        for label, offset in offsets.items()
        if (f := judge_clock(*offset, node=label)).level is not Level.OK
    ]
    return bad or [judge_clock(*max(offsets.values(), key=lambda each: abs(each[1])))]


def _offset(node: Node) -> tuple[float, float]:
    """Round trip and offset in seconds, of the quickest of some round trips."""
    trips = []
    for _ in range(ROUND_TRIPS):
        sent_s, began_s = time.time(), time.perf_counter()
        there_s = ray.get(node.probe.now_s.remote(), timeout=ANSWER_S)
        trip_s = time.perf_counter() - began_s
        trips.append((trip_s, there_s - sent_s - trip_s / 2))
    return min(trips)


def judge_clock(trip_s: float, offset_s: float, *, node: str = "") -> Finding:
    """What a clock's offset means, of which half the round trip is uncertain."""
    text = f"{offset_s:+.3f} s from this machine's, +-{trip_s / 2:.3f} s"
    certain_s = abs(offset_s) - trip_s / 2
    remedy = "run chrony or ntpd on every node"
    if certain_s > SKEW_FAIL_S:
        return fail(
            "clocks", found=f"{text}: S3 and TLS will refuse this node", remedy=remedy, node=node
        )
    return (
        warn("clocks", found=text, remedy=remedy, node=node)
        if certain_s > SKEW_WARN_S
        else ok("clocks", found=text, node=node)
    )


def _shared_home(nodes: Sequence[Node], home: Path, url: str | None) -> list[Finding]:
    """Where the nodes meet: in the home, in a folder as storage, or in a bucket, of which each node tries for itself."""
    if url is None:
        return _shared(nodes, home)
    if is_local(url):
        return _shared(nodes, Path(open_storage(url).url))
    return [ok("shared home", found=f"not needed: {redact(url)} keeps what the nodes write")]


def _shared(nodes: Sequence[Node], home: Path) -> list[Finding]:
    """The folder is one for all: what this process writes every node reads, and the other way round."""
    marker = f".doctor-{uuid.uuid4().hex}"
    made = not home.exists()
    here = home / marker
    remedy = f"mount the same file system at {home} on every node, or keep results with --storage"
    try:
        home.mkdir(parents=True, exist_ok=True)
        here.write_text(marker)
    except OSError as error:
        return [
            fail(
                "shared home",
                found=f"{home}: {error.strerror}",
                remedy="choose a --home that can be written",
            )
        ]
    try:
        seen = _ask(nodes, "seen", str(here), marker)
        strangers = [node.label for node in nodes if not seen[node.label]]
        found = [
            fail("shared home", found=f"{home} is another folder there", remedy=remedy, node=label)
            for label in strangers
        ]
        found += [
            f
            for node in nodes
            if seen[node.label] and (f := _comes_back(node, home, marker)) is not None
        ]
    finally:
        for path in home.glob(f"{marker}*"):
            path.unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):
                home.rmdir()
    return found or [
        ok(
            "shared home",
            found=f"{home} is the same folder on {len(nodes)} node{'s' if len(nodes) > 1 else ''}",
        )
    ]


def _comes_back(node: Node, home: Path, marker: str) -> Finding | None:
    path = home / f"{marker}-{node.id[:12]}"
    why = ray.get(node.probe.leave.remote(str(path), marker), timeout=ANSWER_S)
    if why is not None:
        return fail(
            "shared home",
            found=f"{home}: {why}",
            remedy="mount it writable, for the user that runs Ray",
            node=node.label,
        )
    if not _appears(path, marker):
        found = f"what it writes to {home} does not come back within {VISIBLE_S:g} s"
        return fail(
            "shared home",
            found=found,
            remedy="one file system, one server, no caching overlay",
            node=node.label,
        )
    return None


def _appears(path: Path, text: str) -> bool:
    end = time.monotonic() + VISIBLE_S
    while True:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system ask its server
            if path.read_text() == text:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)


def _tokens(*, local: bool) -> Finding:
    """Whether the cluster asks for a token: its ports let whoever reaches them run code."""
    if is_token_auth_enabled():
        return ok("tokens", found="the cluster asks for a token")
    found = "the cluster runs for whoever reaches its ports, without a token"
    return (
        warn("tokens", found=found, remedy="unset RAY_AUTH_MODE")
        if local
        else fail("tokens", found=found, remedy=TOKEN_REMEDY)
    )


def _dashboard() -> Finding:
    """Who can reach the dashboard, which takes jobs, and whether it answers without a token."""
    url = get_dashboard_url()
    if not url:
        return ok("dashboard", found="none")
    beyond = [address for address in _listeners(url) if not _is_loopback(address)]
    where = (
        f"{url}, listening on {', '.join(beyond)}" if beyond else f"{url}, on this machine alone"
    )
    if _answers_strangers(url):
        remedy = "start Ray with RAY_AUTH_MODE=token and --dashboard-host=127.0.0.1; reach it through ssh -L"
        found = f"{where}, lists and takes jobs without a token"
        return (
            fail("dashboard", found=found, remedy=remedy)
            if beyond
            else warn("dashboard", found=found, remedy=remedy)
        )
    if beyond:
        found = f"{where}; it asks for the token, which travels unencrypted"
        return warn(
            "dashboard", found=found, remedy="--dashboard-host=127.0.0.1, and ssh -L to reach it"
        )
    return ok("dashboard", found=where)


def _listeners(url: str) -> list[str]:
    """Addresses of this machine that the dashboard's port is open on; the dashboard's own where it runs elsewhere."""
    host, _, port = url.rpartition(":")
    host = host.strip("[]")
    ours = {
        address.address for addresses in psutil.net_if_addrs().values() for address in addresses
    }
    if host not in ours:
        return [host]
    listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return sorted({each.ip for each in listening if each and each.port == int(port)})


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def _answers_strangers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{url}/api/jobs/", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
