"""The demo in a process of its own."""

import os
import socket
import subprocess
import sys
import time


class Served:
    """`fastclip demo` in its own process, with its own place for temporary folders."""

    def __init__(self, run, images, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folder.mkdir()
        self.temporary, self.log, self.address = (
            folder,
            folder.with_suffix(".log"),
            f"http://127.0.0.1:{port}",
        )
        arguments = [run, "--images", images, "--port", port, "--workers", 0]
        environment = {"TMPDIR": str(folder), "FASTCLIP_CACHE": str(folder.with_suffix(".cache"))}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fastclip", "demo", *map(str, arguments)],
                env=os.environ | environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + 300
        while self.address not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()  # noqa: PT018
            time.sleep(0.1)

    def end(self, number):
        """Stop it by a signal: it exits cleanly and deletes its temporary folder."""
        assert [*self.temporary.glob("fastclip-demo-*")]
        self.process.send_signal(number)
        assert self.process.wait(100) == 0, self.log.read_text()
        assert not [*self.temporary.iterdir()]
        assert "Traceback" not in self.log.read_text()
