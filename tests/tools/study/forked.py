"""`fastclip` forked from a process that has imported torch: real runs for studies that start immediately.

As a program it requests a process from the server that `serve` starts, with its own arguments, folder,
environment and output; it forwards SIGTERM, and exits with that process' exit code.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import contextmanager

VARIABLE = "FORKED_FASTCLIP"
PROGRAM = (sys.executable, __file__)


@contextmanager
def serve(path):
    """A server at this path; programs started inside find it by the environment."""
    from tests.ranks import CONTEXT

    server = CONTEXT.Process(target=_serve, args=(str(path),))
    server.start()
    while not path.exists():
        assert server.is_alive()
        time.sleep(0.01)
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        server.kill()
        server.join()


def _serve(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path + ".new")
        server.listen()
        os.rename(path + ".new", path)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
            connection.close()


def _answer(connection):
    request, outputs, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    child = os.fork()
    if child == 0:
        connection.close()
        _become(json.loads(request), outputs)
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request, outputs):
    from fastclip.cli import main

    os.setpgrp()
    multiprocessing.set_start_method("fork", force=True)  # or loader workers would import torch again
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        code = main(request["arguments"])
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _request(arguments):
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[VARIABLE])
        socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
        answers = connection.makefile()
        child = int(answers.readline())
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
        return int(answers.readline())


if __name__ == "__main__":
    code = _request(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
