"""Ports, the temporary folder, and the requests that the guard admits."""

import errno
import os
import signal
import socket
import tempfile
from pathlib import Path

import pytest

from fastclip.errors import OptionError
from fastclip.tools.demo.limits import MAX_BYTES
from fastclip.tools.demo.server import Guard, is_loopback, sigterm_as_ctrl_c, take_port, temporary_folder

FILE = "/gradio_api/file="


def ask(path, method="GET", host="127.0.0.1:7860", listens_on="127.0.0.1", folder="/nowhere", **headers):
    """The status of a refused request; None if it is admitted."""
    named = {"host": host} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "headers": [(name.encode(), str(value).encode()) for name, value in named.items()],
    }
    refusal = Guard(lambda *_: None, Path(folder), listens_on).refusal(scope)
    return refusal and refusal[0]


@pytest.mark.parametrize("path", ["/", "/config", "/theme.css", "/assets/x.js", "/gradio_api/queue/data"])
def test_requests_of_the_page_are_admitted(path):
    assert ask(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/proxy=http://example.com/",
        "/gradio_api/process_recording",
        "/gradio_api/vibe-edit",
        "/gradio_api/run/predict",
        "/monitoring",
        "/docs",
        "/anything",
    ],
)
def test_routes_that_the_page_does_not_need_are_closed(path):
    assert ask(path) == 403


def test_only_uploads_can_be_fetched(tmp_path):
    folder, secret = tmp_path / "uploads", tmp_path / "secret.txt"
    folder.mkdir()
    secret.write_text("secret")
    (folder / "own.png").write_bytes(b"")
    (folder / "link.png").symlink_to(secret)
    assert ask(f"{FILE}{folder}/own.png", folder=folder) is None
    for path in ("/etc/passwd", secret, f"{folder}/../secret.txt", f"{folder}/link.png", "pyproject.toml"):
        assert ask(f"{FILE}{path}", folder=folder) == 403
    assert ask(f"{FILE}http://example.com/", folder=folder) == 403


def test_other_host_names_and_other_sites_are_refused():
    assert ask("/", host="evil.example:7860") == 403
    assert ask("/", host="localhost:7860") is None
    assert ask("/", host="evil.example:7860", listens_on="0.0.0.0") is None
    assert ask("/", origin="http://127.0.0.1:7860") is None
    for listens_on in ("127.0.0.1", "0.0.0.0"):
        assert ask("/", origin="http://evil.example", listens_on=listens_on) == 403


def test_requests_that_are_too_large_or_of_unknown_length_are_refused():
    upload = "/gradio_api/upload"
    assert ask(upload, "POST", content_length=MAX_BYTES) is None
    assert ask(upload, "POST", content_length=MAX_BYTES + 2**20 + 1) == 413
    assert ask(upload, "POST") == 411


def test_the_next_free_port_is_taken():
    with take_port("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with take_port("127.0.0.1", port) as second:
            assert port < second.getsockname()[1] <= port + 20


def test_21_ports_are_tried():
    tried = []

    class InUse(socket.socket):
        def bind(self, address):
            tried.append(address)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    with pytest.raises(OSError, match=r"7860.*7880.*--port"):
        take_port("127.0.0.1", 7860, new_socket=InUse)
    assert tried == [("127.0.0.1", port) for port in range(7860, 7881)]


@pytest.mark.parametrize(
    ("host", "port", "option", "value"),
    [("127.0.0.1", 70000, "port", 70000), ("192.0.2.1", 7860, "host", "192.0.2.1")],
)
def test_an_impossible_address_is_an_error(host, port, option, value):
    with pytest.raises(OptionError) as caught:
        take_port(host, port)
    assert (caught.value.option, caught.value.value) == (option, value)


def test_loopback_addresses_are_recognised():
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.0.0.9")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.2", "example.com")))


def test_the_temporary_folder_is_deleted_and_the_environment_restored(monkeypatch):
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    before, directory = dict(os.environ), tempfile.tempdir
    with temporary_folder() as folder:
        (folder / "upload").write_text("x")
        assert os.environ["GRADIO_TEMP_DIR"] == tempfile.gettempdir() == str(folder)
        assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
    assert not folder.exists()
    assert (dict(os.environ), tempfile.tempdir) == (before, directory)


def test_sigterm_raises_keyboard_interrupt():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
