"""A report that is served while its sweep runs, on this machine alone.

The page asks every three seconds whether anything has changed; it is built anew only then, and reloads where its reader was.
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
from suite.record.folder import Home
from suite.report.data import read, sweeps
from suite.report.page import page, waiting_page
from suite.tracking.rows import TAG, runs_with_rows
from suite.tracking.store import open_store, resolve_uri

HOST = "127.0.0.1"
WATCHED = ("result.json", "spec.json")


class Source:
    """The pages of a home, each built when it is asked for and something has changed since.

    Args:
        home: As `suite run --home`.
        sweep: Only this one; None = all of the home.
        tracking_uri, sort: As `suite.report.read`.
    """

    def __init__(
        self,
        home: Path,
        sweep: str | None = None,
        *,
        tracking_uri: str | None = None,
        sort: str = "score",
    ) -> None:
        self.home, self.sweep, self.tracking_uri, self.sort = home, sweep, tracking_uri, sort
        self._pages: dict[str, tuple[str, str]] = {}
        self._lock = Lock()

    def version(self) -> str:
        """Changes when a trial is handed out or ends, and when a row of the leaderboard does."""
        digest = hashlib.sha256()
        for folder in Home(self.home).trials():
            failed = sum(
                1 for _ in folder.path.glob("failure-*.json")
            )  # not read: one may be half written, or of another version
            digest.update(
                f"{folder.hash}{[_stamp(folder.path / name) for name in WATCHED]}{failed}".encode()
            )
        try:
            store = open_store(resolve_uri(Home(self.home), self.tracking_uri), create=False)
            for run in runs_with_rows(store):
                digest.update(f"{run.id}{run.tags[TAG]}".encode())
        except SuiteError as error:  # not there yet, or away: the page says so
            digest.update(str(error).encode())
        return digest.hexdigest()[:16]

    def names(self) -> list[str]:
        """Sweeps that have a page."""
        return [self.sweep] if self.sweep is not None else sweeps(self.home, self.tracking_uri)

    def page(self, name: str | None) -> str:
        """The page of a sweep, which knows its version; None = the first. What cannot be read yet is said on the page."""
        with self._lock:
            version = self.version()
            try:
                chosen = self._chosen(name)
                if self._pages.get(chosen, ("", ""))[0] != version:
                    report = read(self.home, chosen, tracking_uri=self.tracking_uri, sort=self.sort)
                    self._pages[chosen] = (version, page(report, live=version))
                return self._pages[chosen][1]
            except SuiteError as error:
                return waiting_page(str(error))

    def _chosen(self, name: str | None) -> str:
        """Raises UnknownNameError for another sweep than the only one that was asked for."""
        if name is not None and self.sweep not in (None, name):
            raise UnknownNameError("sweep", name, [str(self.sweep)], where="this server")
        return name or self.names()[0]


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def make_server(source: Source, port: int = 0) -> ThreadingHTTPServer:
    """A server on loopback that has not begun to serve.

    Args:
        source: What it serves: `/` and `/<sweep>`.
        port: 0 = any that is free.

    Raises:
        ConfigError: The port is taken, or not ours to use.
    """
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(source))
    except OSError as error:
        raise ConfigError(
            f"--port {port}: {os.strerror(error.errno or 0)}; give another, or 0 for any that is free"
        ) from error
    server.daemon_threads = True
    return server


def _handler(source: Source) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Serves only who asks for this machine by a name of its own: another site's script could name it as its own host."""

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
                return self._send(403, "text/plain", "this report is served on 127.0.0.1 only")
            try:
                if address.query == "version":
                    return self._send(200, "text/plain", source.version())
                return self._send(
                    200, "text/html", source.page(unquote(address.path).strip("/") or None)
                )
            except Exception as error:  # noqa: BLE001 - a sweep that is being written can be read in any state; the page looks again
                return self._send(
                    500, "text/html", waiting_page(f"{type(error).__name__}: {error}")
                )

        def _send(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            try:
                self.wfile.write(body)
            except (
                BrokenPipeError,
                ConnectionResetError,
            ):  # the page was closed, or reloaded, meanwhile
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a line every three seconds tells nobody anything."""

    return Handler


def addresses(server: ThreadingHTTPServer, names: Sequence[str]) -> list[str]:
    """What to open, one per sweep."""
    return [f"http://{HOST}:{server.server_port}/{name}" for name in names] or [
        f"http://{HOST}:{server.server_port}/"
    ]
