"""`python -m suite` is the command `suite`."""

from __future__ import annotations

from suite.cli import main

if __name__ == "__main__":
    main()
