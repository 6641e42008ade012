"""Checks packages, Ray, Ray's token and its temporary folder, where ended clusters leave theirs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata, util
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from suite.doctor.finding import Check, Finding, fail, ok, warn
from suite.plan.gpus import missing_for_offload, no_offload

DISTRIBUTION = "petl-suite"
USES = {
    "lm-eval": "suite lm-eval",
    "s3": "--storage s3://...",
    "postgres": "an MLflow store in PostgreSQL",
}
"""What each optional set of packages is for; a set that is not here is for developers."""
# Ray takes seconds to import, and far longer from a cold network disk.
IMPORT_TIMEOUT_S = 120.0
LONGEST_SOCKET = 107
"""Bytes of a unix socket's path (`sun_path` of Linux, without its end)."""
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
        ("socket paths", socket_paths),
        ("token file", token_file),
    ]


def packages() -> list[Finding]:
    """Check that every requirement of the suite is met, and which optional sets are complete."""
    try:
        texts = metadata.requires(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        found = f"{DISTRIBUTION} is not installed, only importable"
        return [fail("packages", found=found, remedy="pip install -e . (or make setup)")]
    always: list[Requirement] = []
    optional: list[Requirement] = []
    for text in texts:
        requirement = Requirement(text)
        # The extra "" stands for none: every installation needs these.
        if _asked_for(requirement, ""):
            always.append(requirement)
        else:
            optional.append(requirement)
    bad = _unmet(always)
    findings = [ok("packages", found="every requirement is met")]
    if bad:
        remedy = "pip install -c constraints.txt -e . (or make setup)"
        findings = [fail("packages", found=bad, remedy=remedy)]
    for extra, use in USES.items():
        bad = _unmet([requirement for requirement in optional if _asked_for(requirement, extra)])
        if bad:
            remedy = f"pip install '{DISTRIBUTION}[{extra}]'"
            findings.append(warn("packages", found=f"{bad}: needed for {use}", remedy=remedy))
    return findings


def _asked_for(requirement: Requirement, extra: str) -> bool:
    """Whether an installation with this optional set needs a requirement on this machine."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _unmet(requirements: Iterable[Requirement]) -> str:
    """Say which packages are missing or have a version that does not fit; empty = none."""
    troubles: list[str] = []
    for requirement in requirements:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            troubles.append(f"{requirement.name} is missing")
            continue
        # A release candidate that somebody installed on purpose counts as well.
        if not requirement.specifier.contains(version, prereleases=True):
            expected = requirement.specifier
            troubles.append(f"{requirement.name} is {version}, expected {expected}")
    return "; ".join(troubles)


def compiler() -> Finding:
    """Say whether DeepSpeed can build what `training.offload` needs on a GPU; no more is built."""
    missing = missing_for_offload()
    if missing:
        return ok("compiler", found=f"{no_offload(missing)}; all else needs no compiler")
    return ok("compiler", found="c++ and ninja, which only training.offload needs")


def amdsmi() -> Finding:
    """Check that the package amdsmi, if it is installed, can be imported.

    Its import raises a KeyError where ROCm's library is absent. Ray tries to import it and catches
    nothing but an ImportError, so Ray's own import then fails as well.
    """
    if util.find_spec("amdsmi") is None:
        return ok("amdsmi", found="not installed")
    # In a process of its own, because a library that is broken may end the process.
    error = _import_error("amdsmi")
    if error is None:
        return ok("amdsmi", found="works")
    found = f"installed, but libamd_smi.so is not usable ({error}): Ray breaks on it"
    return fail(
        "amdsmi",
        found=found,
        remedy="pip uninstall amdsmi (nothing here needs it), or install ROCm",
    )


def ray_imports() -> Finding:
    """Check that Ray can be imported, in a process of its own."""
    error = _import_error("ray")
    if error is None:
        return ok("ray", found=metadata.version("ray"))
    return fail(
        "ray",
        found=f"import ray: {error}",
        remedy="see the other lines; then pip install -c constraints.txt 'ray[default,tune]'",
    )


def _import_error(module: str) -> str | None:
    """Return the last line of the error that an import ends with; None = the import works."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, with words of ours
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
            env=dict(os.environ),
        )
    except subprocess.TimeoutExpired:
        return f"not done within {IMPORT_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    # A process that a signal ended writes nothing.
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1][:300]


def _ray_base(environment: Mapping[str, str]) -> Path:
    """Where `ray start` makes the folder `ray`, as Ray itself finds it on Linux."""
    return Path(environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp")  # noqa: S108 - looks at it only


def sessions(environment: Mapping[str, str] = os.environ) -> Finding:
    """Count the Ray clusters that run on this machine, and the folders of those that have ended."""
    base = _ray_base(environment)
    # Ray's processes have the name of their session among their arguments.
    lines: list[str] = []
    for process in psutil.process_iter(["cmdline"]):
        lines.append(" ".join(process.info["cmdline"] or ()))
    live = 0
    stale: list[Path] = []
    # Names begin with the year; `session_latest` is a link to one of them.
    for folder in (base / "ray").glob("session_2*/"):
        if any(folder.name in line for line in lines):
            live += 1
        else:
            stale.append(folder)
    running = f"{live} running in {base}/ray"
    if not stale:
        return ok("ray sessions", found=f"{running}, none left over")
    size_bytes = 0
    for folder in stale:
        for path in folder.rglob("*"):
            # The file behind a link is counted at its own place, or is none of Ray's.
            if path.is_file() and not path.is_symlink():
                size_bytes += path.lstat().st_size
    found = f"{running}, {len(stale)} left over with {size_bytes / 2**20:.0f} MiB"
    remedy = f"remove the {base}/ray/session_* of clusters that have ended"
    return warn("ray sessions", found=found, remedy=remedy)


def socket_paths(environment: Mapping[str, str] = os.environ) -> Finding:
    """Check that the paths of Ray's sockets, below its temporary folder, are short enough.

    A local sweep does not depend on it: its Ray lies in a folder of the suite's in /tmp.
    """
    base = _ray_base(environment)
    # 2**22 is the largest process number of Linux, and so the longest.
    longest = f"{base}/ray/session_2026-01-01_00-00-00_000000_{2**22}/sockets/plasma_store"
    text = f"{len(longest)} bytes below {base}, {LONGEST_SOCKET} are possible"
    if len(longest) > LONGEST_SOCKET:
        found = f"{text}: a `ray start` here would fail; local sweeps use /tmp"
        return warn("socket paths", found=found, remedy="set RAY_TMPDIR to a short folder, as /tmp")
    return ok("socket paths", found=text)


def token_file(environment: Mapping[str, str] = os.environ) -> Finding:
    """Say where Ray's token comes from, and whether others can read it; never show its text."""
    mode = environment.get("RAY_AUTH_MODE", "not set")
    # Ray looks at the variable first, then at the file.
    if environment.get("RAY_AUTH_TOKEN"):
        found = f"RAY_AUTH_MODE {mode}, token in RAY_AUTH_TOKEN, which child processes and logs see"
        return warn("token file", found=found, remedy="put it into ~/.ray/auth_token, mode 600")
    home = Path(environment.get("HOME", "~")).expanduser()
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    if not path.is_file():
        found = f"RAY_AUTH_MODE {mode}, no token at {path}"
        if mode == "token":
            return fail("token file", found=found, remedy=TOKEN_REMEDY)
        return ok("token file", found=f"{found} (a local cluster makes its own)")
    # Whoever reads the token can run code on the cluster.
    bits = stat.S_IMODE(path.stat().st_mode)
    found = f"RAY_AUTH_MODE {mode}, token at {path}, mode {bits:o}"
    if bits & (stat.S_IRWXG | stat.S_IRWXO):
        judge = warn
        if mode == "token":
            judge = fail
        return judge("token file", found=f"{found}: others can read it", remedy=f"chmod 600 {path}")
    return ok("token file", found=found)
