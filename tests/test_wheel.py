"""The wheel as a new user gets it: built, installed without this tree, used in an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fastclip"
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
HEAVY = ("torch", "numpy", "jsonargparse", "open_clip", "PIL", "rich")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build it from a copy of the sources, which keeps the tree clean."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tree / name, ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(out)]
    run([sys.executable, "-m", "pip", "wheel", ".", *options], cwd=tree)
    (wheel,) = out.iterdir()
    return wheel


class NewUser:
    """An environment with the wheel and our dependencies, a home, and an empty working folder."""

    def __init__(self, folder, wheel):
        self.python = folder / "venv" / "bin" / "python"
        run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")])
        options = ["--no-deps", "--no-index", "--no-compile", "--quiet"]
        run([sys.executable, "-m", "pip", "--python", str(self.python), "install", *options, str(wheel)])
        paths = sysconfig.get_paths(vars={"base": str(folder / "venv")})
        self.packages = Path(paths["purelib"])
        # .pth files in these folders are not read: our editable install stays invisible
        borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        self.environment = {
            "HOME": str(self.home),
            "FASTCLIP_CACHE": str(self.home / "cache"),
            "PATH": f"{self.python.parent}:{os.defpath}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "LANG": "C.UTF-8",
        }

    def run(self, *command):
        return run([str(part) for part in command], cwd=self.work, env=self.environment)


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def user(wheel, tmp_path_factory):
    return NewUser(tmp_path_factory.mktemp("user"), wheel)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(PACKAGE.parent).as_posix() for path in ours}
    assert {Path(name).suffix for name in expected} >= {".py", ".json", ".yaml", ".csv"}
    assert packed - expected == set()
    assert expected - packed == set(), "missing in package-data of pyproject.toml"


@pytest.mark.slow
def test_the_installed_package_is_the_wheel_and_not_this_tree(user):
    code = "import fastclip; print(fastclip.__file__)"
    assert Path(user.run("python", "-c", code).stdout.strip()).is_relative_to(user.packages)


def test_help_imports_nothing_heavy(user):
    script = user.python.with_name("fastclip")
    done = user.run("python", "-X", "importtime", script, "--help")
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "fastclip.cli" in imported
    assert not imported & {*HEAVY}
    assert "fastclip train" in done.stdout


@pytest.mark.slow
def test_version_and_recipes_are_printed(user, wheel):
    assert user.run("fastclip", "--version").stdout == f"fastclip {wheel.name.split('-')[1]}\n"
    help_text = user.run("fastclip", "train", "--help").stdout
    missing = [path.stem for path in (PACKAGE / "recipes").glob("*.yaml") if path.stem not in help_text]
    assert not missing


@pytest.mark.slow
@pytest.mark.timeout(300)  # three programs that import torch, one after another
def test_the_first_commands_of_a_new_user_train_a_model(user):
    """`fastclip data get scenes` and `fastclip train --config scenes`, one epoch of one shard."""
    user.run("fastclip", "data", "get", "scenes")
    shorter = ["--data.train", "data/scenes/train/00000.tar", "--epochs", "1"]
    user.run("fastclip", "train", "--config", "scenes", *shorter)
    model = user.work / "runs" / "scenes-fastclip-v3" / "model"
    names = {"README.md", "open_clip_config.json", "open_clip_model.pt", "open_clip_model.safetensors"}
    assert {path.name for path in model.iterdir()} == names
    code = f"import fastclip; print(fastclip.load({str(model)!r}).encode_text('a red circle').norm().item())"
    assert float(user.run("python", "-c", code).stdout) == pytest.approx(1)
    assert {path.name for path in user.work.iterdir()} == {"data", "runs"}
