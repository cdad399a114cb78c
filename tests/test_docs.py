"""Every program in the documents runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"<!-- run: (?P<how>[^\n]+) -->\n```(?:python)?\n(?P<code>.*?)```", re.DOTALL)


def programs():
    """How to run it, and the code, of each fenced program marked `<!-- run: … -->`."""
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]):
        for number, match in enumerate(MARKED.finditer(path.read_text()), start=1):
            yield pytest.param(match["how"], match["code"], id=f"{path.name}-{number}")


@pytest.mark.parametrize(("how", "code"), programs())
def test_program_runs(how, code, tmp_path):
    script = tmp_path / "example"
    script.write_text(code)
    name, *options = how.split()
    python = str(Path(sys.executable).parent)
    launcher = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "shell": ["bash", "-euo", "pipefail"],
    }
    command = [*launcher[name], *options, str(script)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{python}:{os.environ['PATH']}",
        "FASTCLIP_CACHE": str(tmp_path / "cache"),
    }
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.strip()


def test_the_examples_are_found():
    assert sum("using-the-loss" in program.id for program in programs()) == 4


def test_links_between_documents_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
