"""The command line `suite`: one thin file per command, which imports what it needs when it runs."""

from __future__ import annotations

from suite.cli.app import main

__all__ = ["main"]
