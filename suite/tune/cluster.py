"""A Ray cluster for the time of a sweep: a local one of its own, or a running one that was named."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray._private.state import state as cluster_state
from ray.exceptions import AuthenticationError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from suite.errors import ResourceError
from suite.redact import has_password, redact
from suite.tune import network
from suite.tune.access import loopback_only
from suite.tune.resources import Node, local_cpus

log = logging.getLogger(__name__)
INTERFACE_WAIT_S = 60.0
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
    with environment(RAY_ENVIRONMENT), _node_messages_logged(), loopback_only() if address is None else nullcontext():
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
    fixed = {"OMP_NUM_THREADS": str(threads), "RAY_CHDIR_TO_TRIAL_DIR": "0", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return passed | fixed


def cluster_nodes() -> list[Node]:
    """Resources per node, at the size an autoscaling cluster can grow to."""
    nodes: list[Node] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = cluster_state.get_max_resources_from_cluster_config()
    if most is None:
        return nodes
    missing = {name: most.get(name, 0.0) - sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
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
    function: Any = ray.remote(network.interfaces)
    nodes = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    asked = {i: function.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(i, soft=False)).remote() for i in nodes}
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=INTERFACE_WAIT_S)
    found = {nodes[i]: ray.get(reference) for i, reference in asked.items() if reference in ready}
    lacking = [f"{address} has {', '.join(known)}" for address, known in found.items() if name not in known]
    if lacking:
        raise ResourceError(f"resources.interface: got {name!r}, expected one that every node has; {'; '.join(lacking)}")


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
