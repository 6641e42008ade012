"""Serve a report while its sweep runs, on this machine alone.

The page asks every three seconds whether anything has changed. It is built anew only then, and
reloads at the place where its reader was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import unquote, urlsplit

from suite.errors import ConfigError, SuiteError, UnknownNameError
from suite.files import stamp
from suite.record.folder import RESULT, SPEC, Home
from suite.report.data import read, sweeps
from suite.report.page import page, waiting_page
from suite.tracking.rows import TAG, runs_with_rows
from suite.tracking.store import open_store, resolve_uri

# This machine alone: the server asks nobody for a password.
HOST = "127.0.0.1"
# A trial has a spec once it is handed out, and a result once it has ended.
WATCHED = (RESULT, SPEC)


class Source:
    """The pages of a home. Each is built when somebody asks for it and something has changed.

    Args:
        home: The home of `suite run --home`.
        sweep: The only sweep to serve; None = all of the home.
        tracking_uri, sort: Arguments of `suite.report.read`.
    """

    def __init__(
        self,
        home: Path,
        sweep: str | None = None,
        *,
        tracking_uri: str | None = None,
        sort: str = "score",
    ) -> None:
        self.home = home
        self.sweep = sweep
        self.tracking_uri = tracking_uri
        self.sort = sort
        self._pages: dict[str, tuple[str, str]] = {}  # by sweep: version and text
        self._lock = Lock()

    def version(self) -> str:
        """Compute a digest that changes with every trial's start or end, and with every row."""
        digest = hashlib.sha256()
        for folder in Home(self.home).trials():
            # Reading thousands of records every three seconds would slow the sweep.
            stamps = [stamp(folder.path / name) for name in WATCHED]
            # Failures are counted, not read: one may be half written, or of another version.
            failures = len(list(folder.path.glob("failure-*.json")))
            digest.update(f"{folder.hash}{stamps}{failures}".encode())
        try:
            store = open_store(resolve_uri(Home(self.home), self.tracking_uri), create=False)
            for run in runs_with_rows(store):
                digest.update(f"{run.id}{run.tags[TAG]}".encode())
        except SuiteError as error:
            # The store is not there yet, or away: the page says so.
            digest.update(str(error).encode())
        return digest.hexdigest()[:16]

    def names(self) -> list[str]:
        """Sweeps that have a page."""
        if self.sweep is not None:
            return [self.sweep]
        return sweeps(self.home, self.tracking_uri)

    def page(self, name: str | None) -> str:
        """Give the page of a sweep; None = the first sweep.

        The page holds its version. What cannot be read yet is said on the page.
        """
        # One page is built at a time: a second reader waits, and gets the same page.
        with self._lock:
            version = self.version()
            try:
                chosen = self._chosen(name)
                if self._pages.get(chosen, ("", ""))[0] != version:
                    report = read(self.home, chosen, tracking_uri=self.tracking_uri, sort=self.sort)
                    self._pages[chosen] = (version, page(report, live=version))
                return self._pages[chosen][1]
            except SuiteError as error:
                # The waiting page looks again by itself, until it gets the report.
                return waiting_page(str(error))

    def _chosen(self, name: str | None) -> str:
        """The sweep to show.

        Raises:
            UnknownNameError: It is not the only sweep that is served.
        """
        if name is not None and self.sweep not in (None, name):
            raise UnknownNameError("sweep", name, [str(self.sweep)], where="this server")
        return name or self.names()[0]


def make_server(source: Source, port: int = 0) -> ThreadingHTTPServer:
    """A server on loopback that has not begun to serve.

    Args:
        source: The pages that it serves: `/` and `/<sweep>`.
        port: 0 = any free port.

    Raises:
        ConfigError: The port is taken, or this user may not take it.
    """
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(source))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"--port {port}: {reason}; give another, or 0 for any that is free"
        ) from error
    server.daemon_threads = True  # Ctrl-C does not wait for open connections
    return server


def _handler(source: Source) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers only requests that name this machine as their host.

        Otherwise another site's script could give its own name this machine's address, and read
        the report.
        """

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
                self._send(403, "text/plain", "this report is served on 127.0.0.1 only")
                return
            try:
                if address.query == "version":
                    self._send(200, "text/plain", source.version())
                else:
                    name = unquote(address.path).strip("/")
                    self._send(200, "text/html", source.page(name or None))
            except Exception as error:  # noqa: BLE001 - a running sweep may be in any state
                reason = f"{type(error).__name__}: {error}"
                self._send(500, "text/html", waiting_page(reason))  # the page looks again

        def _send(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")  # the page changes under one address
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                # The page was closed, or reloaded, in the meantime.
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a line every three seconds tells nobody anything."""

    return Handler


def addresses(server: ThreadingHTTPServer, names: Sequence[str]) -> list[str]:
    """List the addresses to open, one per sweep; only the server's own before any sweep."""
    return [f"http://{HOST}:{server.server_port}/{name}" for name in names or [""]]
