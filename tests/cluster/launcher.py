"""Ray on the hosts of a bed: by its cluster launcher through SSH as a user starts it, or host by host."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.cluster.bed import Bed, Host
from tests.cluster.processes import wait_until

PORT = 6379
DASHBOARD_PORT = 8265
STORE_BYTES = 80 * 2**20
SETTINGS = {
    # a host that does not answer five times is dead: after some 20 s instead of a minute
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    # Ray 2.60: the new autoscaler forgets the head of a `local` cluster, counts it among the workers, and starts one too few
    "RAY_enable_autoscaler_v2": "0",
}


def share_token(*hosts: Host) -> None:
    """Write one new secret token to each host's ~/.ray/auth_token."""
    token = secrets.token_hex(32)
    for host in hosts:
        path = host.home / ".ray" / "auth_token"
        path.parent.mkdir(exist_ok=True)
        path.touch(0o600)
        path.write_text(token)


def cluster_file(bed: Bed, head: str, workers: Sequence[str], *, cpus: int = 1) -> Path:
    """A file for `ray up`, in `bed.shared`; no rank runs on the head, `cpus` of them on each worker."""
    config = {
        "cluster_name": "bed",
        "provider": {
            "type": "local",
            "head_ip": bed.host(head).address,
            "worker_ips": [bed.host(name).address for name in workers],
        },
        "auth": {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"},
        "file_mounts": {"~/.ray/auth_token": "~/.ray/auth_token"},
        "min_workers": len(workers),
        "max_workers": len(workers),
        "head_start_ray_commands": [
            "ray stop",
            _start_head("--autoscaling-config=~/ray_bootstrap_config.yaml"),
        ],
        "worker_start_ray_commands": ["ray stop", _start_worker("$RAY_HEAD_IP", cpus)],
    }
    path = bed.shared / "cluster.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def start_head(head: Host) -> None:
    """`ray start --head` without SSH or autoscaler; the host needs a token."""
    head.run(_start_head(), timeout_s=300)


def start_worker(worker: Host, head: Host, *, cpus: int = 1) -> None:
    """Join a host to a head's cluster, whose token it has."""
    worker.run(_start_worker(head.address, cpus), timeout_s=300)


def start_cluster(head: Host, workers: Sequence[Host], *, cpus: int = 1) -> None:
    """A cluster with a token of its own, host by host; returns when all are in it."""
    share_token(head, *workers)
    start_head(head)
    for worker in workers:
        start_worker(worker, head, cpus=cpus)
    wait_for_hosts(head, [head, *workers])


def alive(head: Host) -> set[str]:
    """Addresses of the hosts that are in a head's cluster."""
    listed = head.run(
        ["ray", "list", "nodes", "--format", "json", "--filter", "state=ALIVE"], check=False
    )
    return (
        {str(node["node_ip"]) for node in json.loads(listed.stdout)}
        if listed.returncode == 0
        else set()
    )


def wait_for_hosts(head: Host, hosts: Sequence[Host], *, timeout_s: float = 180.0) -> None:
    """Until exactly these hosts are in the cluster."""
    wait_until(
        f"{[host.name for host in hosts]} in the cluster",
        lambda: alive(head) == {host.address for host in hosts},
        timeout_s=timeout_s,
    )


def job_address(head: Host) -> str:
    """For `ray job submit --address` and `suite submit --address`."""
    return f"http://{head.address}:{DASHBOARD_PORT}"


def _start(options: str) -> str:
    """Three times, because a raylet crashes when its agent takes longer than 15 s to start, as it may where many Rays share few cores."""
    settings = " ".join(f"{key}={value}" for key, value in SETTINGS.items())
    start = f"ray start {options} --object-store-memory={STORE_BYTES}"
    return f"export {settings}; tries=1; until {start}; do ray stop --force; (( tries++ < 3 )) || exit 1; done"


def _start_head(more: str = "") -> str:
    return _start(f"--head --port={PORT} --num-cpus=0 --dashboard-host=0.0.0.0 {more}".rstrip())


def _start_worker(head: str, cpus: int) -> str:
    return _start(f"--address={head}:{PORT} --num-cpus={cpus}")
