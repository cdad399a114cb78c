"""The page's server: one address, one temporary folder, and only the routes that the page needs.

gradio's own routes do more than this page needs, such as fetching files of other sites. The guard in front of
them lets through what the page asks for, if the page itself asks.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from fastclip.tools.demo.limits import MAX_BYTES

_MORE_PORTS = 20  # tried after the first
_SLACK = 2**20  # bytes of a request beside the uploaded file
_CLOSING = 2  # seconds that an open browser has to let go
_API = "/gradio_api/"
_PAGE = ("/assets/", "/static/", "/svelte/")
_PAGE_FILES = ("/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt")
_CALLS = ("startup-events", "queue/join", "queue/data", "heartbeat/", "upload", "cancel", "reset")
_POLICY = (  # the browser itself keeps the page from any other address
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'self'"
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def take_port(host: str, port: int) -> socket.socket:
    """A socket on this port, or on the next that is free; its number is in getsockname()."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port {port} is no port: give a number from 1 to 65535, for example 7860.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(port + _MORE_PORTS, 2**16 - 1)
    for number in range(port, last + 1):
        taken = socket.socket(family)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host, number))
            taken.listen()
        except OSError as error:
            taken.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ValueError(
                    f"--host {host} is no address of this machine ({error.strerror or error}). "
                    "Try 127.0.0.1, or 0.0.0.0 for all of them."
                ) from error
        else:
            return taken
    raise OSError(f"The ports from {port} to {last} are taken. Give another one with --port.")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Where gradio writes uploads, and all else; gone at the end. Enter it before gradio is imported."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="fastclip-demo-", ignore_cleanup_errors=True) as name:
        settings = {
            "GRADIO_TEMP_DIR": name,
            "GRADIO_EXAMPLES_CACHE": name,
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_RUN_HISTORY": "False",
        }
        kept = {key: os.environ.get(key) for key in settings}
        os.environ.update(settings)
        tempfile.tempdir = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = before
            for key, value in kept.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


def serve(app: Guard, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Until Ctrl-C or SIGTERM, which raise KeyboardInterrupt; `ready` is called when the page is there."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=_CLOSING, server_header=False
    )
    Server(config).run(sockets=[listening])


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Both then unwind the stack, so that the temporary folder goes."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Guard:
    """Lets through what the page asks for, and tells the browser to ask nobody else."""

    def __init__(self, app: Callable, folder: Path, host: str):
        self.app, self.folder = app, folder.resolve()
        # A site elsewhere can give this machine a name of its own, and so speak to it through a browser here.
        self.hosts = ("localhost", "127.0.0.1", "::1", host) if is_loopback(host) else None

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        refusal = self.refusal(scope)
        if refusal is None:
            return await self.app(scope, receive, _with_policy(send))
        status, words = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": words.encode()})

    def refusal(self, scope: dict) -> tuple[int, str] | None:
        """Status and reason, or None if the request may pass."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self.hosts is not None and urlsplit(f"//{host}").hostname not in self.hosts:
            return 403, "Another name leads here: open the page under the address that fastclip printed."
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "Only the page itself may ask."
        if not self._is_known(scope["path"]):
            return 403, "The page has nothing here."
        if scope["method"] == "POST":
            length = headers.get("content-length", "")
            if not length.isdecimal():
                return 411, "How long is it? Content-Length is missing."
            if int(length) > MAX_BYTES + _SLACK:
                return 413, f"{MAX_BYTES // 2**20} MB is the most."
        return None

    def _is_known(self, path: str) -> bool:
        if path.startswith(f"{_API}file="):
            file = Path(path.removeprefix(f"{_API}file="))
            return file.is_absolute() and file.resolve().is_relative_to(self.folder)
        return path in _PAGE_FILES or path.startswith((*_PAGE, *(_API + call for call in _CALLS)))


def _with_policy(send: Callable) -> Callable:
    added = [
        (b"content-security-policy", _POLICY.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    ]

    async def send_with_policy(message: dict) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return send_with_policy
