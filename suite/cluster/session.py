"""A Ray cluster for the time of a sweep: a local one of its own, or a running one that was named."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import worker as ray_worker
from ray._private.state import state as cluster_state
from ray.exceptions import AuthenticationError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from suite.cluster import network
from suite.cluster.access import loopback_only
from suite.errors import ResourceError
from suite.plan.resources import Node, local_cpus
from suite.redact import has_password, redact

log = logging.getLogger(__name__)
T = TypeVar("T")
ANSWER_S = 60.0
OBJECT_STORE_BYTES = 128 * 2**20  # only specifications and epoch records pass through it
PASSED_ON = (
    "SUITE_PATH",
    "SUITE_TASKS",
    "SUITE_TRUST_REMOTE_CODE",
    "PYTHONPATH",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
)
"""Variables that workers on other machines get too; tokens never, they stay in each machine's own files."""
RAY_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # a submitted driver's workers get its job's working folder and, variable by variable, ours
}


@contextmanager
def cluster(address: str | None, *, threads: int) -> Iterator[list[Node]]:
    """Connect, and give the resources of every node. A local cluster listens on loopback alone.

    A cluster that this process is connected to already is used and left as it is. Left-over clusters of others are never joined.

    Args:
        address: A running cluster ("auto" finds one on this machine), or None for a local one.
        threads: CPU threads per worker, set before any library counts cores.

    Raises:
        ResourceError: The cluster cannot be reached.
    """
    if ray.is_initialized():
        yield cluster_nodes()
        return
    folder = _session_folder() if address is None else None
    with (
        environment(RAY_ENVIRONMENT),
        _node_messages_logged(),
        loopback_only() if address is None else nullcontext(),
    ):
        try:
            _connect(address, folder, threads)
            yield cluster_nodes()
        finally:
            ray.shutdown()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def _connect(address: str | None, folder: Path | None, threads: int) -> None:
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
        "runtime_env": {"env_vars": worker_environment(threads, inherited=address is None)},
    }
    if address is None:
        options |= {
            "num_cpus": local_cpus(),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(folder),
        }
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        raise ResourceError(
            f"--address {address or 'local'}: no Ray cluster: {redact(error)}; start one with `ray start`, or leave --address out"
        ) from error


def worker_environment(threads: int, *, inherited: bool = False) -> dict[str, str]:
    """What every worker's environment gets on top of its machine's. Ray stores it, logs it and shows it on its dashboard.

    Args:
        inherited: Whether the workers have this process's environment in any case.

    Raises:
        ResourceError: A variable that workers elsewhere need holds a password.
    """
    passed = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
    secret = [key for key, value in passed.items() if has_password(value)]
    if secret and not inherited:
        raise ResourceError(
            f"{secret[0]}={redact(passed[secret[0]])}: holds a password, and what is passed on to workers is stored and shown by Ray; "
            "unset it here and set it on every node of the cluster"
        )
    passed = {key: value for key, value in passed.items() if key not in secret}
    fixed = {
        "OMP_NUM_THREADS": str(threads),
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return passed | fixed


def cluster_nodes() -> list[Node]:
    """Resources per node, at the size an autoscaling cluster can grow to."""
    nodes: list[Node] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = cluster_state.get_max_resources_from_cluster_config()
    if most is None:
        return nodes
    missing = {
        name: most.get(name, 0.0) - sum(node.get(name, 0.0) for node in nodes)
        for name in ("CPU", "GPU")
    }
    return nodes if missing["CPU"] <= 0 and missing["GPU"] <= 0 else [*nodes, missing]


def free_nodes() -> list[Node]:
    """What of each node's resources nobody holds."""
    free: list[Node] = list(cluster_state.available_resources_per_node().values())
    return free


def check_interface(name: str) -> None:
    """Ask every node for a network interface.

    Raises:
        ResourceError: One of them lacks it; says which, and what it has.
    """
    nodes = {
        str(node["NodeID"]): str(node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    }
    found = ask_nodes(nodes, network.interfaces)
    lacking = [
        f"{nodes[node]} has {', '.join(known)}"
        for node, known in found.items()
        if name not in known
    ]
    if lacking:
        raise ResourceError(
            f"resources.interface: got {name!r}, expected one that every node has; {'; '.join(lacking)}"
        )


def ask_nodes(
    nodes: Mapping[str, str], function: Callable[..., T], *arguments: object
) -> dict[str, T]:
    """What a function says on each of some nodes. One that leaves meanwhile, or does not answer in time, is left out: Ray does without it.

    Args:
        nodes: What to call each, by Ray's id.
        function: Runs in a worker there.

    Returns:
        Answers by Ray's id.

    Raises:
        ResourceError: A node is there, and the function fails.
    """
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    on = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
    asked = {
        node: remote.options(scheduling_strategy=where).remote(*arguments)
        for node, where in on.items()
    }
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
    answers: dict[str, T] = {}
    for node, reference in asked.items():
        try:
            if reference in ready:
                answers[node] = ray.get(reference)
        except RayTaskError as error:
            why = redact(str(error).strip().splitlines()[-1])[:300]
            remedy = "install it there as it is here (suite doctor --address shows what differs)"
            raise ResourceError(
                f"node {nodes[node]}: cannot run the suite ({why}); {remedy}"
            ) from error
        except RayError:
            log.warning("node %s left while it was asked for what it has", nodes[node])
    return answers


@contextmanager
def _node_messages_logged() -> Iterator[None]:
    """Ray prints messages of its nodes to stdout whatever `log_to_driver` says: into a live table, or a command's JSON."""
    before = ray_worker.print_to_stdstream

    def to_log(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        log.info("%s: %s", data.get("pid"), "\n".join(map(str, data["lines"])))

    ray_worker.print_to_stdstream = to_log
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = before


def _session_folder() -> Path:
    """A short name, because unix sockets live below it; those that killed processes of this user left are removed."""
    prefix = f"suite-ray-{os.getuid()}-"
    for stale in Path("/tmp").glob(f"{prefix}*"):  # noqa: S108 - unix sockets need a short path; mkdtemp makes it, for this user alone
        owner = stale.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(stale, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir="/tmp"))


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the time of the block."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
