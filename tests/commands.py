"""Runs commands and programs of the documents in processes that have imported torch already.

A process is forked from one that has done so: importing takes longer than most of the commands. This module
is imported in each of them, and imports little itself.
"""

import multiprocessing
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from fastclip.config.parse import parse
from tests.workers import CONTEXT


def run_shell(code, folder):
    """Run each line; one that fails is told with what it printed."""
    for line in commands(code):
        words = shlex.split(line, comments=True)
        work, given = (_fastclip, words[1:]) if words[0] == "fastclip" else (_bash, line)
        _in_child(work, given, folder, line)


def run_python(code, folder):
    """Run a whole program."""
    program = folder / "program.py"
    program.write_text(code)
    _in_child(_program, str(program), folder, code)


def read_options(line, folder):
    """Whether `fastclip` would take this command; it is told to print its options instead of running.

    What launches it, such as torchrun, is left out. Other commands pass.
    """
    words = shlex.split(line, comments=True)
    if "fastclip" in words:
        words = words[words.index("fastclip") + 1 :]
        _in_child(_fastclip, [*words, "--print_config"], folder, line)


def commands(code):
    """The lines of a shell block, each whole: one that ends with a backslash goes on in the next."""
    lines = code.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if shlex.split(line, comments=True)]


def remove_runs_of(code, folder):
    """Remove the runs that the block trains: it would go on with them, or refuse them.

    The folder has to be the current one, where its recipes are found.
    """
    for line in commands(code):
        words = shlex.split(line, comments=True)
        if words[:2] == ["fastclip", "train"] and not {"--help", "--print_config"} & {*words}:
            shutil.rmtree(folder / str(parse(words[2:]).out), ignore_errors=True)


def _in_child(work, given, folder, shown, timeout=60):
    """work(given) in the folder, in a process that has imported torch already; it has to exit with 0."""
    log = folder.with_suffix(".log")
    log.write_text("")
    process = CONTEXT.Process(target=_child, args=(work, given, str(folder), str(log)))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode == 0, f"exit code {process.exitcode} of\n{shown}\n{log.read_text()}"


def _child(work, given, folder, log):
    multiprocessing.set_start_method("fork", force=True)  # or readers of images would import torch again
    torch.set_num_threads(1)
    os.environ["FASTCLIP_CACHE"] = f"{folder}/.cache"
    os.chdir(folder)
    with open(log, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        sys.exit(work(given))


def _fastclip(words):
    from fastclip.cli import main

    return main(words)


def _bash(line):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.call(["bash", "-euo", "pipefail", "-c", line], env=os.environ | {"PATH": path})


def _program(path):
    runpy.run_path(path, run_name="__main__")
