"""Checks what a Ray cluster can do; a process on every node answers for it."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from suite.cluster.access import asks_for_token, require_token
from suite.cluster.session import cluster, last_line
from suite.doctor.finding import Finding, Level, fail, merge_nodes, ok, run_checks, warn
from suite.doctor.install import TOKEN_REMEDY
from suite.doctor.join import Node, check_join
from suite.doctor.machine import machine_checks
from suite.doctor.places import home_writable, left_as_found, storage
from suite.errors import ResourceError
from suite.record.provenance import git_state, versions
from suite.redact import redact
from suite.storage.urls import is_local, open_storage

ANSWER_S = 120.0
VISIBLE_S = 10.0
"""How long another node may take to see a file.

Network file systems keep what they know of a folder for seconds.
"""
# S3 and TLS refuse clocks that are far off; both limits are ours.
SKEW_WARN_S = 1.0
SKEW_FAIL_S = 60.0
ROUND_TRIPS = 5
REVISION = "revision of the suite"
# All versions are compared, but one line has room for these only.
SHOWN_VERSIONS = ("python", "torch", "deepspeed", "transformers", "ray", REVISION)


class Probe:
    """Answers the questions of the doctor from a process on one node."""

    def findings(self, home: str, url: str | None) -> list[Finding]:
        """The checks of a single machine, and of the places that it writes to."""
        # The storage is tried from each node, since credentials and the network differ between
        # them.
        checks = [*machine_checks(Path(home)), ("home", lambda: home_writable(Path(home)))]
        if url is not None:
            checks.append(("storage", lambda: storage(url)))
        return run_checks(checks)

    def versions(self) -> dict[str, str | None]:
        """Versions of the packages that can change a number, and the suite's own revision."""
        state = git_state()
        revision = "not a git checkout"
        if state["revision"] is not None:
            revision = state["revision"][:12]
            if state["dirty"]:
                revision += ", edited"
        return {**versions(), REVISION: revision}

    def now_s(self) -> float:
        return time.time()

    def sees(self, path: str, text: str) -> bool:
        """Whether this node soon has that file with that text."""
        return _appears(Path(path), text)

    def write(self, path: str, text: str) -> str | None:
        """Write a file, and return why that failed; None = it is written."""
        try:
            Path(path).write_text(text)
        except OSError as error:
            return error.strerror or str(error)
        return None


Probes = Mapping[Node, Any]
"""A `Probe` actor on each node."""


def check_cluster(address: str | None, *, home: Path, url: str | None = None) -> list[Finding]:
    """Run every check that needs Ray.

    Args:
        address: A running cluster ("auto" finds one here); None = start a local one for the check.
        home: Where a sweep would live.
        url: The storage behind the home.
    """
    try:
        # That a cluster asks for none is a finding of its own.
        if address is not None and asks_for_token(address):
            require_token(address)
        # Nodes that try a new home at once keep each other from removing it.
        with left_as_found(home), cluster(address, threads=1):
            return _check(home, url, local=address is None)
    except ResourceError as error:
        remedy = "ray status on the head shows whether it runs"
        if address is None:
            remedy = "see the lines of memory, disk and open files"
        return [fail("cluster", found=str(error), remedy=remedy)]
    # Ray's token lies in the HOME, and a local Ray's folder in /tmp.
    except OSError as error:
        remedy = "give this user a HOME and a /tmp that can be written"
        return [fail("cluster", found=str(error), remedy=remedy)]


def _check(home: Path, url: str | None, *, local: bool) -> list[Finding]:
    found = _size(local=local)
    # A node that does not answer is a finding, and the others are checked all the same.
    with _probes() as probes:
        answering, silent = _answering(probes)
        found += silent
        if answering:
            found += run_checks(
                [
                    ("nodes", lambda: _each(answering, home, url, local=local)),
                    ("versions", lambda: check_versions(_ask(answering, "versions"))),
                    ("clocks", lambda: _clocks(answering)),
                    ("shared home", lambda: _shared_home(answering, home, url)),
                    ("join", lambda: check_join(list(answering))),
                    ("tokens", lambda: _tokens(local=local)),
                    ("dashboard", _dashboard),
                ]
            )
    return found


def _size(*, local: bool) -> list[Finding]:
    """Say what the cluster has, and which nodes it has lost."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    # Ray goes on listing nodes that it has lost, also those that have come back since.
    gone = {node["NodeManagerAddress"] for node in ray.nodes() if not node["Alive"]}
    gone -= {node["NodeManagerAddress"] for node in alive}
    total = ray.cluster_resources()
    parts = [_count(len(alive), "node")]
    parts += [f"{total[name]:g} {name}" for name in ("CPU", "GPU") if name in total]
    size = ", ".join([*parts, f"Ray {ray.__version__}"])
    found = [ok("cluster", found=f"a local one starts: {size}" if local else size)]
    if gone:
        found.append(
            warn(
                "cluster",
                found=f"nodes that have gone: {', '.join(sorted(gone))}",
                remedy="ray start them again, unless they were meant to go",
            )
        )
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# ---- the processes on the nodes ------------------------------------------------------------------


@contextmanager
def _probes() -> Iterator[Probes]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in alive]
    actor: Any = ray.remote(Probe)
    probes = {}
    for node in alive:
        name, address = node["NodeID"], node["NodeManagerAddress"]
        # Two nodes of one machine have the same address, so a label needs a piece of the id.
        several = addresses.count(address) > 1
        label = f"{address} ({name[:6]})" if several else address
        # Hard affinity: a probe that could start elsewhere would answer for the wrong node.
        strategy = NodeAffinitySchedulingStrategy(name, soft=False)
        # Without a CPU of its own, so that a cluster that is busy can be checked too.
        probe = actor.options(num_cpus=0, scheduling_strategy=strategy).remote()
        probes[Node(name, label, address, int(node["Resources"].get("GPU", 0)))] = probe
    try:
        yield probes
    finally:
        for probe in probes.values():
            # The actor may be gone together with its node.
            with contextlib.suppress(RayError):
                ray.kill(probe, no_restart=True)


def _answering(probes: Probes) -> tuple[Probes, list[Finding]]:
    """The probes that run, and what is wrong with the other nodes."""
    asked = {node: probe.now_s.remote() for node, probe in probes.items()}
    # One deadline for all, or many silent nodes would take minutes each.
    end = time.monotonic() + ANSWER_S
    answering = {}
    silent = []
    for node, reference in asked.items():
        try:
            # At least a moment for each, because an answer may be there when the time is over.
            ray.get(reference, timeout=max(0.1, end - time.monotonic()))
            answering[node] = probes[node]
        except GetTimeoutError:
            found = f"no process started there within {ANSWER_S:g} s"
            remedy = "look at that node's load and its raylet.out"
            silent.append(fail("nodes", found=found, remedy=remedy, node=node.label))
        except RayError as error:
            found = f"a process of the suite cannot run there: {last_line(error)}"
            remedy = "install this checkout there, with the same constraints.txt"
            silent.append(fail("nodes", found=found, remedy=remedy, node=node.label))
    return answering, silent


def _ask(probes: Probes, method: str, *arguments: Any) -> dict[str, Any]:
    """Ask every node for one answer, and return the answers by the node's label."""
    asked = [getattr(probe, method).remote(*arguments) for probe in probes.values()]
    # All are asked before any answer is awaited, so that the nodes work at the same time.
    answers = ray.get(asked, timeout=ANSWER_S)
    return {node.label: answer for node, answer in zip(probes, answers, strict=True)}


def _each(probes: Probes, home: Path, url: str | None, *, local: bool) -> list[Finding]:
    """Check each machine by itself. The only node of a local cluster was checked before."""
    if local:
        return []
    findings = []
    for label, found in _ask(probes, "findings", str(home), url).items():
        findings += [replace(finding, node=label) for finding in found]
    return merge_nodes(findings, len(probes))


# ---- versions and clocks -------------------------------------------------------------------------


def check_versions(by_node: Mapping[str, Mapping[str, str | None]]) -> list[Finding]:
    """Whether all nodes have equal versions of everything that can change a number.

    Args:
        by_node: Package -> version, by node.
    """
    packages: dict[str, dict[str | None, list[str]]] = {}  # nodes by version, by package
    # In the order in which nodes name them: a node may lack a package that others have.
    names = dict.fromkeys(name for installed in by_node.values() for name in installed)
    for package in names:
        nodes = packages.setdefault(package, {})
        for node, installed in by_node.items():
            nodes.setdefault(installed.get(package), []).append(node)
    found = []
    for package, nodes in packages.items():
        if len(nodes) > 1:
            where = [f"{version or 'absent'} on {', '.join(on)}" for version, on in nodes.items()]
            text = f"{package}: {'; '.join(where)}"
            remedy = "install the same checkout and constraints.txt on every node"
            found.append(fail("versions", found=text, remedy=remedy))
    if found:
        return found
    first = next(iter(by_node.values()))
    shown = ", ".join(f"{name} {first.get(name)}" for name in SHOWN_VERSIONS)
    return [ok("versions", found=f"the same on all nodes: {shown}")]


def _clocks(probes: Probes) -> list[Finding]:
    """Compare each node's clock with this one's; the finding is one line if all are right."""
    offsets = {node.label: _offset(probe) for node, probe in probes.items()}
    judged = [judge_clock(*offset, node=label) for label, offset in offsets.items()]
    bad = [finding for finding in judged if finding.level is not Level.OK]
    if bad:
        return bad
    # The worst of the good ones stands for all.
    return [judge_clock(*max(offsets.values(), key=lambda each: abs(each[1])))]


def _offset(probe: Any) -> tuple[float, float]:
    """Measure a node's round trip and clock offset, in seconds, by the quickest of some trips."""
    trips = []
    for _ in range(ROUND_TRIPS):
        sent_s = time.time()
        began_s = time.perf_counter()
        there_s = ray.get(probe.now_s.remote(), timeout=ANSWER_S)
        trip_s = time.perf_counter() - began_s
        trips.append((trip_s, there_s - sent_s - trip_s / 2))
    # The quickest trip is the least uncertain one.
    return min(trips)


def judge_clock(trip_s: float, offset_s: float, *, node: str = "") -> Finding:
    """Judge the offset of a node's clock.

    Half the round trip is uncertain: the node may have answered at either end of it.
    """
    text = f"{offset_s:+.3f} s from this machine's, +-{trip_s / 2:.3f} s"
    certain_s = abs(offset_s) - trip_s / 2
    remedy = "run chrony or ntpd on every node"
    if certain_s > SKEW_FAIL_S:
        text += ": S3 and TLS will refuse this node"
        return fail("clocks", found=text, remedy=remedy, node=node)
    if certain_s > SKEW_WARN_S:
        return warn("clocks", found=text, remedy=remedy, node=node)
    return ok("clocks", found=text, node=node)


# ---- the home ------------------------------------------------------------------------------------


def _shared_home(probes: Probes, home: Path, url: str | None) -> list[Finding]:
    """Check the place where the nodes meet: the home, or the storage.

    Each node tries a bucket for itself.
    """
    folder = None
    if url is None:
        folder = home
    elif is_local(url):
        folder = Path(open_storage(url).url)
    if folder is not None:
        with left_as_found(folder):
            return _shared(probes, folder)
    return [ok("shared home", found=f"not needed: {redact(url)} keeps what the nodes write")]


def _shared(probes: Probes, folder: Path) -> list[Finding]:
    """Whether the nodes and this process read what each other write to a folder."""
    # A name that nobody else uses, for two doctors may look at the same home.
    mark = f".doctor-{uuid.uuid4().hex}"
    here = folder / mark
    try:
        folder.mkdir(parents=True, exist_ok=True)
        here.write_text(mark)
    except OSError as error:
        found = f"{folder}: {error.strerror}"
        return [fail("shared home", found=found, remedy="choose a --home that can be written")]
    problems = []
    try:
        sees = _ask(probes, "sees", str(here), mark)
        for node, probe in probes.items():
            if sees[node.label]:
                # The other way too: a mount may be read-only, or show this machine's files and hide
                # its own.
                problem = _comes_back(probe, folder / f"{mark}-{node.id[:12]}", mark)
            else:
                problem = (
                    f"{folder} is another folder there",
                    f"mount the same file system at {folder} on every node,"
                    " or keep results with --storage",
                )
            if problem is not None:
                found, remedy = problem
                problems.append(fail("shared home", found=found, remedy=remedy, node=node.label))
    finally:
        # Also what nodes wrote, which may appear here late.
        for path in folder.glob(f"{mark}*"):
            path.unlink(missing_ok=True)
    same = f"{folder} is the same folder on {_count(len(probes), 'node')}"
    return problems or [ok("shared home", found=same)]


def _comes_back(probe: Any, path: Path, text: str) -> tuple[str, str] | None:
    """What is wrong with a file that a node writes, and what to do; None = it can be read here."""
    why = ray.get(probe.write.remote(str(path), text), timeout=ANSWER_S)
    if why is not None:
        return f"{path.parent}: {why}", "mount it writable, for the user that runs Ray"
    if not _appears(path, text):
        found = f"what it writes to {path.parent} does not come back within {VISIBLE_S:g} s"
        return found, "one file system, one server, no caching overlay"
    return None


def _appears(path: Path, text: str) -> bool:
    """Whether a file has that text before `VISIBLE_S` are over."""
    end = time.monotonic() + VISIBLE_S
    while time.monotonic() <= end:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system ask its server
            if path.read_text() == text:
                return True
        time.sleep(0.2)
    return False


# ---- who may reach it ----------------------------------------------------------------------------


def _tokens(*, local: bool) -> Finding:
    """Whether the cluster asks for a token; else whoever reaches its ports can run code on it."""
    if asks_for_token(ray.get_runtime_context().gcs_address):
        return ok("tokens", found="the cluster asks for a token")
    found = "the cluster runs for whoever reaches its ports, without a token"
    if local:
        return warn("tokens", found=found, remedy="unset RAY_AUTH_MODE")
    return fail("tokens", found=found, remedy=TOKEN_REMEDY)


def _dashboard() -> Finding:
    """Who can reach the dashboard, which takes jobs, and whether it answers without a token."""
    url = _dashboard_url()
    if not url:
        return ok("dashboard", found="none")
    # The URL names one address, but the port may be open on all of them.
    beyond = [address for address in _listeners(url) if not _is_loopback(address)]
    where = f"{url}, on this machine alone"
    if beyond:
        where = f"{url}, listening on {', '.join(beyond)}"
    if _answers_without_token(url):
        # Whoever can send a job runs any code; on the loopback these are users of this machine
        # alone.
        judge = fail if beyond else warn
        return judge(
            "dashboard",
            found=f"{where}, lists and takes jobs without a token",
            remedy="start Ray with RAY_AUTH_MODE=token and --dashboard-host=127.0.0.1;"
            " reach it through ssh -L",
        )
    if beyond:
        return warn(
            "dashboard",
            found=f"{where}; it asks for the token, which travels unencrypted",
            remedy="--dashboard-host=127.0.0.1, and ssh -L to reach it",
        )
    return ok("dashboard", found=where)


def _dashboard_url() -> str:
    """HOST:PORT; empty = the cluster has no dashboard."""
    # Connected already: this only returns what the connection knows.
    context = ray.init(ignore_reinit_error=True, configure_logging=False)
    return str(context.dashboard_url or "")


def _answers_without_token(url: str) -> bool:
    try:
        return not asks_for_token(f"http://{url}")
    except ResourceError:  # it does not answer at all
        return False


def _listeners(url: str) -> list[str]:
    """The addresses of this machine on which the dashboard's port is open.

    If the dashboard runs on another machine, this is the address in its URL.
    """
    host, _, port = url.rpartition(":")
    # An IPv6 address stands in brackets before its port.
    host = host.strip("[]")
    ours = set()
    for addresses in psutil.net_if_addrs().values():
        ours |= {address.address for address in addresses}
    if host not in ours:  # what is open there cannot be seen from here
        return [host]
    found = set()
    for connection in psutil.net_connections("tcp"):
        at: Any = connection.laddr
        if connection.status == psutil.CONN_LISTEN and at.port == int(port):
            found.add(at.ip)
    return sorted(found)


def _is_loopback(address: str) -> bool:
    try:
        # A link-local IPv6 address ends with a zone, such as `%eth0`.
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return address == "localhost"
