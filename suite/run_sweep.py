"""`suite run` as a script, because `ray submit` copies a script to the head node and runs it there.

    ray submit cluster.yaml suite/run_sweep.py -- SWEEP.yaml

It joins the cluster that runs there (`--address auto`). The path of a sweep may be as it is in the
checkout, wherever the script was copied to.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run one sweep on the cluster of this machine; this always ends in `SystemExit`.

    Args:
        arguments: The arguments of `suite run`; a leading `--`, which a launcher passed on, is
            dropped.
    """
    # Imported here, because only the lines at the end of this file put the checkout on the path.
    import suite
    from suite.cli import main as command

    given = list(arguments)
    if given[:1] == ["--"]:
        del given[0]
    root = Path(suite.__file__).parents[1]
    # a sweep of the checkout, named from the checkout's folder; options may stand before it
    for word in given:
        is_sweep = word.endswith((".yaml", ".yml"))
        if is_sweep and not Path(word).exists() and (root / word).is_file():
            os.chdir(root)
            break
    if not any(argument.partition("=")[0] == "--address" for argument in given):
        given += ["--address", "auto"]
    command(["run", *given])


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    # run in the checkout, Python puts suite/ itself on the path, where its modules are top-level
    if folder.name == "suite" and (folder / "__init__.py").is_file():
        sys.path[0] = str(folder.parent)
    main(sys.argv[1:])
