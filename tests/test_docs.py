"""Every command and program in the documents runs as it stands, or says what it needs that a test has not."""

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import commands, read_options, remove_runs_of, run_python, run_shell
from tests.workshop import build_workshop, copy_workshop

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PROGRAMS = "fastclip|make|torchrun|srun|sbatch|pip|python3?|img2dataset|npm|hf|git|bash|cp|cd|export"
COMMAND = re.compile(rf"^(\$ )?({PROGRAMS})\s", re.M)
NEEDS = {
    "gpu": "one or more GPUs",
    "network": "downloads",
    "slurm": "a cluster",
    "browser": "a person who looks at a page",
    "minutes": "longer than a test may take",
    "loop": "a training loop of the reader's own: it is a part of a program",
}


@dataclass(frozen=True)
class Block:
    """A fenced block with the marker on the line before it, e.g. `<!-- run: shell -->`."""

    path: Path
    line: int
    language: str
    verb: str
    """run, needs, or nothing."""
    how: str
    code: str

    def __str__(self):
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def is_runnable(self):
        return self.language == "python" or COMMAND.search(self.code)


def blocks():
    """Every fenced block of every document."""
    for path in DOCUMENTS:
        lines = ["", *path.read_text().splitlines()]
        fences = [number for number, line in enumerate(lines) if line.lstrip().startswith("```")]
        for start, end in zip(fences[::2], fences[1::2], strict=True):
            marker = re.fullmatch(r"<!-- (run|needs): (.+) -->", lines[start - 1])
            verb, how = marker.groups() if marker else ("", "")
            code = "\n".join(lines[start + 1 : end]) + "\n"
            yield Block(path, start, lines[start].strip("` "), verb, how, code)


def marked(verb, *hows):
    """Blocks with such a marker, as a test's parameters."""
    found = [block for block in blocks() if block.verb == verb and (not hows or block.how.split()[0] in hows)]
    return pytest.mark.parametrize("block", found, ids=str)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents") / "workshop"
    yield build_workshop(folder)
    shutil.rmtree(folder)


@pytest.fixture
def folder(workshop, tmp_path):
    """A workshop for one block."""
    yield copy_workshop(workshop, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")


@pytest.mark.slow
@marked("run", "shell")
def test_commands_run(block, folder, monkeypatch):
    monkeypatch.chdir(folder)
    remove_runs_of(block.code, folder)
    run_shell(block.code, folder)


@pytest.mark.slow
@marked("run", "python")
def test_programs_run(block, folder):
    run_python(block.code, folder)


# torch 2.15 now and then aborts a rank that exits just after a collective: a thread of gloo drops its tensor
# while Python ends.
GLOO_ABORT = "terminate called without an active exception"


@pytest.mark.slow
@marked("run", "torchrun")
def test_programs_of_several_ranks_run(block, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(block.code)
    command = [sys.executable, "-m", "torch.distributed.run", *block.how.split()[1:], str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(3):
        run = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
        )
        if GLOO_ABORT not in run.stderr:
            break
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@marked("needs")
def test_what_cannot_run_here_is_at_least_well_formed(block, tmp_path):
    if block.language == "python":
        ast.parse(block.code, str(block))
        return
    (tmp_path / "empty").mkdir()
    for line in commands(block.code):
        read_options(line, tmp_path / "empty")


@pytest.mark.slow
def test_settings_in_the_documents_are_read(tmp_path):
    (tmp_path / "empty").mkdir()
    found = [block for block in blocks() if block.language == "yaml"]
    assert found
    for number, block in enumerate(found):
        (tmp_path / "empty" / f"{number}.yaml").write_text(block.code)
        read_options(f"fastclip train --config emoji --config {number}.yaml", tmp_path / "empty")


def test_every_command_and_program_is_marked():
    missing = [str(block) for block in blocks() if block.is_runnable and not block.verb]
    assert not missing, f"<!-- run: … --> or <!-- needs: … --> is missing before {', '.join(missing)}"


def test_markers_say_something_known():
    for block in blocks():
        known = {"run": {"shell", "python", "torchrun"}, "needs": {*NEEDS}, "": {""}}[block.verb]
        words = block.how.split(", ") if block.verb == "needs" else [block.how.split(" ")[0]]
        assert known >= {*words}, f"{block}: {block.how!r} is none of {', '.join(known)}"


def test_every_marker_stands_before_a_block():
    for path in DOCUMENTS:
        written = len(re.findall(r"<!-- (?:run|needs):", path.read_text()))
        assert written == sum(block.verb != "" for block in blocks() if block.path == path), path.name


def test_make_knows_the_targets_that_the_documents_name():
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    named = {word for block in blocks() for word in re.findall(r"^make (\S+)", block.code, re.M)}
    assert named
    assert named <= {*targets}


def test_links_between_documents_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_promise_names_a_test_that_exists():
    promised = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(promised) > 15
    for file, name in promised:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {name}"
