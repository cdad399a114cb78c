"""Ports, the temporary folder, and what the guard lets through."""

import os
import signal
import socket
import tempfile
from pathlib import Path

import pytest

from fastclip.tools.demo.limits import MAX_BYTES
from fastclip.tools.demo.server import Guard, is_loopback, sigterm_as_ctrl_c, take_port, temporary_folder

FILE = "/gradio_api/file="


def ask(path, method="GET", host="127.0.0.1:7860", listens_on="127.0.0.1", folder="/nowhere", **headers):
    """The status of a refusal; None if the request may pass."""
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
def test_what_the_page_asks_for_passes(path):
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
def test_routes_that_the_page_does_not_need_are_shut(path):
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


def test_other_names_and_other_sites_are_refused_on_a_loopback_address():
    assert ask("/", host="evil.example:7860") == 403
    assert ask("/", host="localhost:7860") is None
    assert ask("/", host="evil.example:7860", listens_on="0.0.0.0") is None
    assert ask("/", origin="http://127.0.0.1:7860") is None
    for listens_on in ("127.0.0.1", "0.0.0.0"):
        assert ask("/", origin="http://evil.example", listens_on=listens_on) == 403


def test_large_requests_and_those_of_unknown_length_are_refused():
    upload = "/gradio_api/upload"
    assert ask(upload, "POST", content_length=MAX_BYTES) is None
    assert ask(upload, "POST", content_length=MAX_BYTES + 2**20 + 1) == 413
    assert ask(upload, "POST") == 411


def test_a_taken_port_gives_way_to_the_next():
    with take_port("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with take_port("127.0.0.1", port) as second:
            assert port < second.getsockname()[1] <= port + 20


def test_no_free_port_is_an_error_that_names_the_option(monkeypatch):
    def bind(self, address):
        raise OSError(98, "Address already in use")

    class Taken(socket.socket):
        pass

    monkeypatch.setattr(Taken, "bind", bind, raising=False)
    monkeypatch.setattr("fastclip.tools.demo.server.socket.socket", Taken)
    with pytest.raises(OSError, match=r"from 7860 to 7880 are taken.*--port"):
        take_port("127.0.0.1", 7860)


@pytest.mark.parametrize(
    ("host", "port", "words"), [("127.0.0.1", 70000, "--port 70000"), ("192.0.2.1", 7860, "--host 192.0.2.1")]
)
def test_addresses_that_cannot_be_are_told(host, port, words):
    with pytest.raises(ValueError, match=words):
        take_port(host, port)


def test_loopback_addresses_are_known():
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.0.0.9")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.2", "example.com")))


def test_the_temporary_folder_is_gone_at_the_end_and_nothing_else_has_changed(monkeypatch):
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    before, directory = dict(os.environ), tempfile.tempdir
    with temporary_folder() as folder:
        (folder / "upload").write_text("x")
        assert os.environ["GRADIO_TEMP_DIR"] == tempfile.gettempdir() == str(folder)
        assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
    assert not folder.exists()
    assert (dict(os.environ), tempfile.tempdir) == (before, directory)


def test_sigterm_unwinds_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
