"""The server of the page: one address, one temporary folder, and only the routes that the page needs.

gradio has more routes than that, such as one that fetches files from other sites. The guard in front of them
admits only requests that the page itself makes.
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

from fastclip.errors import OptionError
from fastclip.tools.demo.limits import MAX_BYTES

_MORE_PORTS = 20  # to try after the first
_SLACK = 2**20  # bytes of a request besides the uploaded file
_SHUTDOWN = 2  # seconds for open connections to close
_API = "/gradio_api/"
_PAGE = ("/assets/", "/static/", "/svelte/")
_PAGE_FILES = ("/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt")
_CALLS = ("startup-events", "queue/join", "queue/data", "heartbeat/", "upload", "cancel", "reset")
_POLICY = (  # makes the browser block requests to other sites
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'self'"
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def take_port(
    host: str, port: int, new_socket: Callable[[int], socket.socket] = socket.socket
) -> socket.socket:
    """A socket that listens on this port or the next free one; getsockname() has its number."""
    if not 0 <= port < 2**16:
        raise OptionError("port", port, "must be from 0 to 65535", example=7860)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(port + _MORE_PORTS, 2**16 - 1)
    for number in range(port, last + 1):
        listening = new_socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen()
        except OSError as error:
            listening.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                rule = f"is not an address of this machine ({error.strerror or error})"
                advice = "Use 127.0.0.1, or 0.0.0.0 to listen on all addresses."
                raise OptionError("host", host, rule, advice=advice) from error
        else:
            return listening
    raise OSError(f"Ports {port} to {last} are all in use. Choose another with --port.")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for all files of gradio, deleted at the end. Enter it before gradio is imported."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="fastclip-demo-", ignore_cleanup_errors=True) as name:
        settings = {
            "GRADIO_TEMP_DIR": name,
            "GRADIO_EXAMPLES_CACHE": name,
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_RUN_HISTORY": "False",
        }
        environment = {key: os.environ.get(key) for key in settings}
        os.environ.update(settings)
        tempfile.tempdir = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = before
            for key, value in environment.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


def serve(app: Guard, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until Ctrl-C or SIGTERM raises KeyboardInterrupt; call `ready` once the page can be opened."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=_SHUTDOWN, server_header=False
    )
    Server(config).run(sockets=[listening])


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, so that the temporary folder is deleted."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Guard:
    """Admits only requests of the page, and makes the browser block requests to other sites."""

    def __init__(self, app: Callable, folder: Path, host: str):
        self.app, self.folder = app, folder.resolve()
        # Against DNS rebinding: another site may resolve its own name to this machine.
        self.hosts = ("localhost", "127.0.0.1", "::1", host) if is_loopback(host) else None

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        refusal = self.refusal(scope)
        if refusal is None:
            return await self.app(scope, receive, _with_policy(send))
        status, reason = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": reason.encode()})

    def refusal(self, scope: dict) -> tuple[int, str] | None:
        """Status and reason, or None if the request is admitted."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self.hosts is not None and urlsplit(f"//{host}").hostname not in self.hosts:
            return 403, "Unknown host name. Open the page at the address that fastclip printed."
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "Requests from other sites are not allowed."
        if not self._is_known(scope["path"]):
            return 403, "This path is not available."
        if scope["method"] == "POST":
            length = headers.get("content-length", "")
            if not length.isdecimal():
                return 411, "The Content-Length header is required."
            if int(length) > MAX_BYTES + _SLACK:
                return 413, f"Uploads may have at most {MAX_BYTES // 2**20} MiB."
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
