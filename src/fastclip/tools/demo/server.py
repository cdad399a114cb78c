"""The server of the page: one address and one temporary folder."""

from __future__ import annotations

import errno
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fastclip.errors import OptionError
from fastclip.tools.demo.guard import Guard

_MORE_PORTS = 20  # to try after the first
_SHUTDOWN = 2  # seconds for open connections to close


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
