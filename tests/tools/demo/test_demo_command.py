"""The command: where images come from, what it prints, and what it rejects."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from fastclip.cli import main
from fastclip.errors import PathError
from fastclip.tools.demo import server
from fastclip.tools.demo.demo_command import demo as demo_command
from tests.evaluation import replica
from tests.tools.demo.collection import write_images


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return replica.tiny_export(tmp_path_factory.mktemp("model"))


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.tar", n=9)


@pytest.fixture
def run(model, tmp_path):
    """An exported model in a folder that may get the config of a run."""
    return Path(shutil.copytree(model, tmp_path / "run"))


@pytest.fixture
def served(monkeypatch):
    """Replace the server by one that stops immediately, as at Ctrl-C; return the apps and addresses."""
    calls = []

    def serve(app, listening, ready):
        calls.append((app, listening.getsockname()))
        ready()
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "serve", serve)
    return calls


@pytest.fixture
def demo(capsys):
    def call(*arguments):
        code = main(["demo", *map(str, arguments), "--workers", "0"])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def free_port():
    with server.take_port("127.0.0.1", 0) as listening:
        return listening.getsockname()[1]


def test_the_address_is_printed_and_the_temporary_folder_is_deleted(demo, model, images, served):
    port = free_port()
    code, out, err = demo(model, "--images", images, "--port", port)
    assert code == 0, err
    assert "9 images with 9 captions" in out
    assert f"http://127.0.0.1:{port} " in out
    assert "--host" not in out  # no warning
    (app, address), *_ = served
    assert address == ("127.0.0.1", port)
    assert not app.folder.exists()


def test_the_default_images_of_a_run_are_those_it_was_evaluated_on(demo, run, images, served):
    (run / "config.yaml").write_text(f"evaluate: {{pairs: ['{images}']}}\n")
    code, out, err = demo(run, "--port", free_port())
    assert code == 0, err
    assert "9 images" in out


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (None, "evaluate.pairs"),
        ("evaluate: {every_epochs: 1}", "evaluate.pairs"),
        ("evaluate: [", "evaluate.pairs"),
        ("evaluate: {pairs: gone/*.tar}", "gone/*.tar"),
    ],
)
def test_a_model_without_images_needs_the_option_for_them(run, served, config, named):
    if config is not None:
        (run / "config.yaml").write_text(config)
    with pytest.raises(PathError) as caught:
        demo_command(str(run))
    assert caught.value.path == str(run)
    assert named in caught.value.problem
    assert "--images" in caught.value.problem
    assert not served


def test_the_next_port_is_used_and_printed_if_one_is_in_use(demo, model, images, served):
    with server.take_port("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        code, out, _ = demo(model, "--images", images, "--port", port)
    (_, (_, number)), *_ = served
    assert code == 0
    assert number != port
    assert re.search(rf"\b{port}\b.*\b{number}\b", out)
    assert f"http://127.0.0.1:{number} " in out


def test_a_page_that_others_can_reach_prints_a_warning(demo, model, images, served):
    _, out, _ = demo(model, "--images", images, "--host", "0.0.0.0", "--port", free_port())
    assert "--host 127.0.0.1" in out
    assert "0.0.0.0:" not in out


def test_without_gradio_the_command_to_install_it_is_named(demo, model, images, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    code, _, err = demo(model, "--images", images)
    assert code == 1
    assert "pip install 'fastclip[demo]'" in err
