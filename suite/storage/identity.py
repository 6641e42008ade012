"""The name of a home: several homes that write to one store may have sweeps of the same name."""

from __future__ import annotations

import uuid
from pathlib import Path

from suite.record.folder import Home
from suite.storage.urls import open_storage


def identity_path(home: Home) -> Path:
    return home.path / "tracking-id"


def home_id(home: Home) -> str:
    """A random name that is made once, even if several processes ask at the same time."""
    path = identity_path(home)
    if not path.exists():
        open_storage(home.path).create(path.name, uuid.uuid4().hex[:12].encode())
    return path.read_text()
