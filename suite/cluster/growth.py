"""The nodes that the autoscaler of Ray's launcher may still add. No Ray here.

Ray 2.60 has a place where autoscalers can report what they may add, and its own never do. That of
the launcher (`ray up`) runs beside the head, as the driver does, and reads a file: so does this.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from suite.plan.resources import Node

log = logging.getLogger(__name__)
COUNTED = ("CPU", "GPU")


@functools.cache
def launcher_file(gcs_address: str) -> Path | None:
    """The configuration of the autoscaler of a head; None where none runs on this machine."""
    for process in psutil.process_iter(["cmdline"]):
        options = {}
        for word in process.info["cmdline"] or ():
            name, _, value = word.partition("=")
            options[name] = value
        if options.get("--gcs-address") == gcs_address and options.get("--autoscaling-config"):
            return Path(options["--autoscaling-config"]).expanduser()
    return None


def nodes_to_come(file: Path, alive: Sequence[Node]) -> list[Node]:
    """What an autoscaler may add to the nodes that are up; none if its file cannot be read."""
    try:
        config = yaml.safe_load(file.read_text())
        return _to_come(config, alive)
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        # Asked every few seconds, and Ray itself tells of a file that it cannot read.
        log.info("%s: cannot be read for the nodes that may come: %s", file, error)
        return []


def _to_come(config: Mapping[str, Any], alive: Sequence[Node]) -> list[Node]:
    most = int(config.get("max_workers", 0))
    left = most - (len(alive) - 1)  # the head is no worker
    found: list[Node] = []
    for name, kind in config.get("available_node_types", {}).items():
        has = {key: float(kind.get("resources", {}).get(key, 0)) for key in COUNTED}
        # The launcher does not know the sizes of machines that are there already.
        if name == config.get("head_node_type") or not any(has.values()):
            continue
        up = sum(all(node.get(key, 0.0) == has[key] for key in COUNTED) for node in alive)
        count = max(0, min(int(kind.get("max_workers", most)) - up, left))
        found += [has] * count
        left -= count
    return found
