"""Checks what is installed, and what earlier Ray clusters left: packages, Ray, tokens, sessions."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

import psutil
from packaging.markers import default_environment
from packaging.requirements import Requirement

from suite.doctor.finding import Check, Finding, fail, ok, warn

DISTRIBUTION = "petl-suite"
USES = {
    "lm-eval": "suite lm-eval",
    "s3": "--storage s3://...",
    "postgres": "an MLflow store in PostgreSQL",
}
"""What each optional set of packages is for; a set that is not here is for developers."""
IMPORT_TIMEOUT_S = 120.0
TOKEN_REMEDY = (
    "make a token with `ray get-auth-token --generate`, "  # noqa: S105 - says how to get one
    "copy it to every node, and set RAY_AUTH_MODE=token there"
)


def install_checks() -> list[tuple[str, Check]]:
    """Checks of the installation, without importing Ray into this process."""
    return [
        ("packages", packages),
        ("compiler", compiler),
        ("amdsmi", amdsmi),
        ("ray", ray_imports),
        ("ray sessions", sessions),
        ("token file", token_file),
    ]


def packages() -> list[Finding]:
    """Whether every requirement of the suite is met, and which optional sets are complete."""
    try:
        wanted = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return [
            fail(
                "packages",
                found=f"{DISTRIBUTION} is not installed, only importable",
                remedy="pip install -e . (or make setup)",
            )
        ]
    remedy = "pip install -c constraints.txt -e . (or make setup)"
    # The extra "" stands for none: these are what every installation needs.
    bad = [text for r in wanted if _asked_for(r, "") and (text := _trouble(r))]
    found = [
        fail("packages", found="; ".join(bad), remedy=remedy)
        if bad
        else ok("packages", found="every requirement is met")
    ]
    for extra, use in USES.items():
        missing = [
            text
            for r in wanted
            if _asked_for(r, extra) and not _asked_for(r, "") and (text := _trouble(r))
        ]
        if missing:
            found.append(
                warn(
                    "packages",
                    found=f"{'; '.join(missing)}: needed for {use}",
                    remedy=f"pip install '{DISTRIBUTION}[{extra}]'",
                )
            )
    return found


def _asked_for(requirement: Requirement, extra: str) -> bool:
    environment: dict[str, str] = {
        **{k: str(v) for k, v in default_environment().items()},
        "extra": extra,
    }
    return requirement.marker is None or requirement.marker.evaluate(environment)


def _trouble(requirement: Requirement) -> str:
    """What is wrong with an installed package; empty if nothing is."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    # A release candidate that somebody installed on purpose counts as well.
    fits = requirement.specifier.contains(version, prereleases=True)
    return "" if fits else f"{requirement.name} is {version}, expected {requirement.specifier}"


def compiler() -> Finding:
    """Name the compiler. None is needed: the suite builds none of DeepSpeed's operators."""
    path = shutil.which("c++") or shutil.which("g++")
    return ok(
        "compiler",
        found=f"{path or 'none'}; none is needed "
        "(DeepSpeed's own fused operators and offloading would build with one)",
    )


def amdsmi(python: str = sys.executable) -> Finding:
    """Whether the package amdsmi, if installed, can be imported.

    Where ROCm's library is absent, its import raises a KeyError. Ray tries to import it, expects an
    ImportError at most, and then cannot be imported itself.
    """
    if util.find_spec("amdsmi") is None:
        return ok("amdsmi", found="not installed")
    # In a process of its own, as a library that is missing may end the process.
    error = _import_error("amdsmi", python)
    if error is None:
        return ok("amdsmi", found="works")
    found = f"installed, but libamd_smi.so is not usable ({error}): Ray breaks on it"
    return fail(
        "amdsmi",
        found=found,
        remedy="pip uninstall amdsmi (nothing here needs it), or install ROCm",
    )


def ray_imports(python: str = sys.executable) -> Finding:
    """Whether Ray can be imported, tried in a process of its own."""
    error = _import_error("ray", python)
    if error is None:
        return ok("ray", found=metadata.version("ray"))
    return fail(
        "ray",
        found=f"import ray: {error}",
        remedy="see the other lines; then pip install -c constraints.txt 'ray[default,tune]'",
    )


def _import_error(module: str, python: str) -> str | None:
    """The last line of what an import ends with; None where it works."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, with words of ours
            [python, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
            env=dict(os.environ),
        )
    except subprocess.TimeoutExpired:
        return f"not done within {IMPORT_TIMEOUT_S:g} s"
    return (
        None
        if done.returncode == 0
        else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    )


def sessions(base: Path | None = None) -> Finding:
    """Ray clusters that run on this machine, and folders that ended clusters left behind."""
    base = base or Path(os.environ.get("RAY_TMPDIR") or "/tmp")  # noqa: S108 - looks at it only
    # Ray's processes have the name of their session among their arguments.
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    # Names begin with the year; `session_latest` is a link to one of them.
    folders = [p for p in (base / "ray").glob("session_2*") if p.is_dir() and not p.is_symlink()]
    live = [p for p in folders if any(p.name in line for line in lines)]
    stale = [p for p in folders if p not in live]
    running = f"{len(live)} running in {base}/ray"
    if not stale:
        return ok("ray sessions", found=f"{running}, none left over")
    size_bytes = sum(
        file.lstat().st_size
        for folder in stale
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()
    )
    found = f"{running}, {len(stale)} left over with {size_bytes / 2**20:.0f} MiB"
    return warn(
        "ray sessions",
        found=found,
        remedy=f"remove the {base}/ray/session_* of clusters that have ended",
    )


def token_file(environment: Mapping[str, str] = os.environ) -> Finding:
    """Say where Ray's token comes from, and whether others can read it; never show its text."""
    mode = environment.get("RAY_AUTH_MODE", "not set")
    # Ray looks at the variable first, then at the file.
    if environment.get("RAY_AUTH_TOKEN"):
        found = f"RAY_AUTH_MODE {mode}, token in RAY_AUTH_TOKEN, which child processes and logs see"
        return warn("token file", found=found, remedy="put it into ~/.ray/auth_token, mode 600")
    path = Path(
        environment.get("RAY_AUTH_TOKEN_PATH")
        or Path(environment.get("HOME", "~")).expanduser() / ".ray" / "auth_token"
    )
    if not path.is_file():
        found = f"RAY_AUTH_MODE {mode}, no token at {path}"
        if mode == "token":
            return fail("token file", found=found, remedy=TOKEN_REMEDY)
        return ok("token file", found=f"{found} (a local cluster makes its own)")
    # Whoever reads the token can run code on the cluster.
    bits = stat.S_IMODE(path.stat().st_mode)
    found = f"RAY_AUTH_MODE {mode}, token at {path}, mode {bits:o}"
    if bits & (stat.S_IRWXG | stat.S_IRWXO):
        found, remedy = f"{found}: others can read it", f"chmod 600 {path}"
        return (
            fail("token file", found=found, remedy=remedy)
            if mode == "token"
            else warn("token file", found=found, remedy=remedy)
        )
    return ok("token file", found=found)
