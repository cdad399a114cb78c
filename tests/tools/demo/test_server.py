"""Ports, the temporary folder, and the end."""

import errno
import os
import signal
import socket
import tempfile

import pytest

from fastclip.errors import OptionError
from fastclip.tools.demo.server import sigterm_as_ctrl_c, take_port, temporary_folder


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
