"""`suite run` as a script, because `ray submit` copies one to the head and runs it there.

    ray submit cluster.yaml suite/run_sweep.py -- SWEEP.yaml

It joins the cluster that runs there (`--address auto`) and takes paths of sweeps as they are in the checkout, wherever it was copied to.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run one sweep on the cluster of this machine; always ends in `SystemExit`.

    Args:
        arguments: What follows `suite run`; a `--` that a launcher passed on is dropped.
    """
    import suite
    from suite.cli import main as command

    given = arguments[1:] if arguments[:1] == ["--"] else arguments
    root = Path(suite.__file__).parents[1]
    if given and not Path(given[0]).exists() and (root / given[0]).is_file():
        os.chdir(root)
    named = any(argument == "--address" or argument.startswith("--address=") for argument in given)
    command(["run", *given, *([] if named else ["--address", "auto"])])


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    if (
        folder.name == "suite" and (folder / "__init__.py").is_file()
    ):  # run in the checkout: its modules are found by the package alone
        sys.path[0] = str(folder.parent)
    main(sys.argv[1:])
