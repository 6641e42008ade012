"""A Ray cluster for the time of a sweep: a local one of its own, or a running one."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import services
from ray._private import worker as ray_worker
from ray._private.state import state as cluster_state
from ray.exceptions import AuthenticationError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from suite.cluster import network
from suite.cluster.access import loopback_only, make_token
from suite.cluster.growth import launcher_file, nodes_to_come
from suite.config.variables import environment
from suite.errors import ResourceError, end_of
from suite.plan.resources import Node, local_cpus
from suite.redact import has_password, redact
from suite.storage.lease import of_job

log = logging.getLogger(__name__)
T = TypeVar("T")
ANSWER_S = 60.0
OBJECT_STORE_BYTES = 128 * 2**20  # only specifications and epoch records pass through it
ERROR_CHARS = 300
FOLDERS = (
    "SUITE_PATH",
    "SUITE_TASKS",
    "PYTHONPATH",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
)
"""Variables that name folders; they are passed on too."""
PASSED_ON = (
    *FOLDERS,
    "SUITE_TRUST_REMOTE_CODE",
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
"""Variables that workers on other machines get too.

Never tokens: they stay in each machine's own files.
"""
RAY_ENVIRONMENT = {
    # Ray shall not hide the GPUs from processes that ask for none, as a trial's own does.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's own 15 lets every other process of a shared machine go before the ranks.
    "RAY_worker_niceness": "0",
    # The workers of a submitted driver get its job's working folder and, variable by variable,
    # ours.
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
}


@contextmanager
def cluster(address: str | None, *, threads: int) -> Iterator[list[Node]]:
    """Connect, and give the resources of every node. A local cluster listens on loopback alone.

    A cluster that this process is connected to already is used and left as it is. Clusters that
    others left running are never joined.

    Args:
        address: A running cluster ("auto" finds one on this machine), or None for a local one.
        threads: CPU threads per worker, set before any library counts cores.

    Raises:
        ResourceError: The cluster cannot be reached.
    """
    if ray.is_initialized():  # by a caller that runs several sweeps
        yield cluster_nodes()
        return
    with ExitStack() as stack:
        stack.enter_context(environment(RAY_ENVIRONMENT))
        stack.enter_context(_node_messages_logged())
        folder = None
        if address is None:
            private = _private_folder()
            stack.callback(shutil.rmtree, private, ignore_errors=True)
            # Ray opens its session's folder to everybody (0777), so it lies in one of ours.
            folder = private / "ray"
            make_token()
            stack.enter_context(loopback_only())
            stack.enter_context(_spared_our_signals())
        stack.callback(ray.shutdown)
        with _sigterm_kept():
            _connect(address, folder, threads)
        yield cluster_nodes()


def _connect(address: str | None, folder: Path | None, threads: int) -> None:
    local = address is None
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
        "runtime_env": {"env_vars": worker_environment(threads, inherited=local)},
    }
    if local:
        options |= {
            "num_cpus": local_cpus(),
            "include_dashboard": False,  # it would take jobs, and nobody looks at it
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(folder),
        }
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        # Who gave no address wants no cluster.
        if local:
            raise _not_started("a local Ray", error) from error
        raise ResourceError(
            f"--address {address}: no Ray cluster: {redact(error)};"
            " start one with `ray start`, or leave --address out"
        ) from error
    except Exception as error:
        # Ray has no type of its own for a node that does not start in time.
        if type(error) is not Exception:
            raise
        raise _not_started(
            "a local Ray" if local else f"--address {address}: Ray", error
        ) from error


def _not_started(what: str, error: Exception) -> ResourceError:
    return ResourceError(
        f"{what} did not start: {redact(error)};"
        " see that the machine has memory, processor time and room in /tmp to spare,"
        " then give the same command again"
    )


def worker_environment(threads: int, *, inherited: bool = False) -> dict[str, str]:
    """The variables that every worker gets on top of its machine's.

    Ray stores them, logs them and shows them on its dashboard.

    Args:
        threads: CPU threads per worker.
        inherited: Whether the workers have this process's environment in any case.

    Raises:
        ResourceError: A variable that workers elsewhere need holds a password.
    """
    variables = {}
    for key in PASSED_ON:
        value = os.environ.get(key)
        if value is None:
            continue
        if not has_password(value):
            variables[key] = _as_workers_find(value) if key in FOLDERS else value
        elif not inherited:
            raise ResourceError(
                f"{key}={redact(value)}: holds a password,"
                " and Ray stores and shows what is passed on to workers;"
                " unset it here and set it on every node of the cluster"
            )
    return variables | {
        "OMP_NUM_THREADS": str(threads),  # read once, when torch or numpy is imported
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of a sweep stay what they are
        # Large tensors come from pages of 2 MiB, where the kernel gives them on request: a step
        # that makes and frees hundreds of MiB then has few page faults.
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        "TOKENIZERS_PARALLELISM": "false",  # its threads and forked processes do not mix
        "PYTHONUNBUFFERED": "1",  # the last words of a process that dies reach its log
    }


def _as_workers_find(folders: str) -> str:
    """A list of folders as a process with another working folder finds them.

    Workers of a running cluster have the working folder of `ray start`. Those of a submitted job
    have a copy of the job's, which may lie elsewhere on each node: what lies in it is relative.
    """
    here = Path.cwd()
    is_copied = has_working_folder_of_job()
    found = []
    for folder in folders.split(os.pathsep):
        # An empty one is no folder of the user's; ~ and $ are for the library that reads them.
        if folder and not folder.startswith(("~", "$")):
            path = Path(os.path.abspath(folder))
            if is_copied and path.is_relative_to(here):
                path = path.relative_to(here)
            folder = str(path)
        found.append(folder)
    return os.pathsep.join(found)


def has_working_folder_of_job() -> bool:
    """Whether Ray has unpacked this process's working folder, and does so on every node."""
    return bool(of_job("runtime_env", "working_dir"))


# ---- what the nodes have -------------------------------------------------------------------------


def alive_nodes(*, with_gpu: bool = False) -> dict[str, str]:
    """Host name and address of every node that is up, or of those with a GPU, by Ray's id."""
    nodes = {}
    for node in ray.nodes():
        if node["Alive"] and (not with_gpu or node["Resources"].get("GPU")):
            nodes[node["NodeID"]] = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    return nodes


def cluster_nodes() -> list[Node]:
    """The resources of each node, at the size that an autoscaling cluster can grow to."""
    nodes: list[Node] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # Ray has no public call for the sizes that an autoscaler may reach.
    most = cluster_state.get_max_resources_from_cluster_config()
    if most is None:
        file = launcher_file(ray.get_runtime_context().gcs_address)
        if file is not None:
            nodes += nodes_to_come(file, nodes)
        return nodes
    missing = {}
    for name in ("CPU", "GPU"):
        missing[name] = most.get(name, 0.0) - sum(node.get(name, 0.0) for node in nodes)
    if max(missing.values()) > 0:
        nodes.append(missing)
    return nodes


def free_nodes() -> list[Node]:
    """The resources of each node that nobody holds."""
    # `ray.available_resources()` adds up all nodes, which does not tell whether one worker fits on
    # one of them.
    return list(cluster_state.available_resources_per_node().values())


def draining_nodes() -> set[str]:
    """Ids of the nodes that Ray is about to take away, as announced."""
    # Ray has no public call for it; `ray.nodes()` shows such a node as alive.
    return set(cluster_state.get_draining_nodes())


def check_interface(name: str) -> None:
    """Ask every node for a network interface.

    Raises:
        ResourceError: One of them lacks it; says which, and what it has.
    """
    nodes = alive_nodes()
    lacking = []
    for node, interfaces in ask_nodes(nodes, network.interfaces).items():
        if name not in interfaces:
            lacking.append(f"{nodes[node]} has {', '.join(interfaces)}")
    if lacking:
        raise ResourceError(
            f"resources.interface: got {name!r}, expected one that every node has;"
            f" {'; '.join(lacking)}"
        )


def ask_nodes(
    nodes: Mapping[str, str],
    function: Callable[..., T],
    *arguments: object,
    timeout_s: float = ANSWER_S,
) -> dict[str, T]:
    """Call a function in a worker on each of some nodes.

    A node that leaves meanwhile, or does not answer in time, is left out: Ray goes on without it.

    Args:
        nodes: What to call each in messages, by Ray's id.
        function: Runs on each node.
        arguments: Of the function.
        timeout_s: How long all of them together are waited for.

    Returns:
        Answers by Ray's id.

    Raises:
        ResourceError: A node is there, and the function fails.
    """
    # No CPU is asked for, so that a node whose CPUs are all taken answers, too.
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[node] = remote.options(scheduling_strategy=strategy).remote(*arguments)
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    answers: dict[str, T] = {}
    for node, reference in asked.items():
        if reference not in ready:
            continue
        try:
            answers[node] = ray.get(reference, timeout=timeout_s)
        except RayTaskError as error:
            raise ResourceError(
                f"node {nodes[node]}: cannot run the suite ({last_line(error)});"
                " install it there as it is here (suite doctor --address shows what differs)"
            ) from error
        except RayError:
            log.warning("node %s left while it was asked for what it has", nodes[node])
    return answers


def last_line(error: RayError) -> str:
    """What happened, without the remote traceback above it."""
    return redact(end_of(str(error)))[:ERROR_CHARS]


# ---- this process --------------------------------------------------------------------------------


@contextmanager
def _node_messages_logged() -> Iterator[None]:
    """Write messages of Ray's nodes to the log.

    Ray prints them to stdout, whatever `log_to_driver` says: into a live table, or a command's
    JSON. It has no option against that.
    """
    before = ray_worker.print_to_stdstream

    def to_log(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        log.info("%s: %s", data.get("pid"), "\n".join(map(str, data["lines"])))

    ray_worker.print_to_stdstream = to_log
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = before


def _private_folder() -> Path:
    """A new folder that this user alone can enter; removes those that killed processes left."""
    # Ray's unix sockets lie below it, and their paths may have 107 characters.
    prefix = f"suite-{os.getuid()}-"
    for stale in Path("/tmp").glob(f"{prefix}*"):  # noqa: S108 - mkdtemp makes it, for this user alone
        owner = stale.name.removeprefix(prefix).partition("-")[0]
        # Others can give a folder of theirs such a name.
        is_ours = stale.lstat().st_uid == os.getuid()
        if is_ours and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(stale, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir="/tmp"))


@contextmanager
def _spared_our_signals() -> Iterator[None]:
    """Start Ray's processes outside this process's group.

    `timeout`, and a shell that ends a job, send SIGTERM to the whole group. It would end Ray at
    once, before the trials could write a checkpoint. Ray itself spares them only SIGINT. They end
    with this process all the same: the kernel sees to that.
    """
    starts: Any = services
    before = starts.ConsolePopen
    starts.ConsolePopen = partial(before, process_group=0)
    try:
        yield
    finally:
        starts.ConsolePopen = before


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Put the caller's handler of SIGTERM back after the block.

    `ray.init` sets one that ends the local nodes and then this process, with code 1 and no word.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Without a handler the system would end this process at once; Ray's lets it clean up.
        # Ray sets none outside of the main thread, where nobody may.
        if callable(before) and signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)
