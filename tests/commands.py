"""Runs commands and programs of the documents in processes that have already imported torch.

They are forked from one that has: importing takes longer than most of the commands. This module is imported
in each of them, and imports little itself.
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
from tests.ranks import CONTEXT


def run_shell(code, folder):
    """Run each line; a failure shows what the line printed."""
    for line in commands(code):
        program, *arguments = shlex.split(line, comments=True)
        work, argument = (_fastclip, arguments) if program == "fastclip" else (_bash, line)
        _in_child(work, argument, folder, line)


def run_python(code, folder):
    """Run a whole program."""
    program = folder / "program.py"
    program.write_text(code)
    _in_child(_program, str(program), folder, code)


def read_options(line, folder):
    """Check that `fastclip` accepts this command: run it with --print_config.

    A launcher such as torchrun is skipped. Other commands pass.
    """
    arguments = shlex.split(line, comments=True)
    if "fastclip" in arguments:
        arguments = arguments[arguments.index("fastclip") + 1 :]
        _in_child(_fastclip, [*arguments, "--print_config"], folder, line)


def commands(code):
    """The commands of a shell block; a line that ends with a backslash continues in the next."""
    lines = code.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if shlex.split(line, comments=True)]


def remove_runs_of(code, folder):
    """Remove the runs that the block trains: it would resume or refuse them.

    The folder must be the current one, where its recipes are found.
    """
    for line in commands(code):
        arguments = shlex.split(line, comments=True)
        if arguments[:2] == ["fastclip", "train"] and not {"--help", "--print_config"} & {*arguments}:
            shutil.rmtree(folder / str(parse(arguments[2:]).out), ignore_errors=True)


def _in_child(work, argument, folder, shown, timeout=60):
    """Run work(argument) in the folder, in a process that has already imported torch; it must exit with 0."""
    log = folder.with_suffix(".log")
    log.write_text("")
    process = CONTEXT.Process(target=_child, args=(work, argument, str(folder), str(log)))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode == 0, f"exit code {process.exitcode} of\n{shown}\n{log.read_text()}"


def _child(work, argument, folder, log):
    multiprocessing.set_start_method("fork", force=True)  # or loader workers would import torch again
    torch.set_num_threads(1)
    os.environ["FASTCLIP_CACHE"] = f"{folder}/.cache"
    os.chdir(folder)
    with open(log, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        sys.exit(work(argument))


def _fastclip(arguments):
    from fastclip.cli import main

    return main(arguments)


def _bash(line):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.call(["bash", "-euo", "pipefail", "-c", line], env=os.environ | {"PATH": path})


def _program(path):
    runpy.run_path(path, run_name="__main__")
