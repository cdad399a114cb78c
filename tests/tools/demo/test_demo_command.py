"""The verb: where pictures come from, what it prints, and what it refuses."""

import shutil
from pathlib import Path

import pytest

from fastclip.cli import main
from fastclip.tools.demo import server
from tests.evaluation import replica
from tests.tools.demo.collection import write_pictures


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return replica.tiny_export(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pictures(tmp_path):
    return write_pictures(tmp_path / "pictures.tar", n=9)


@pytest.fixture
def run(model, tmp_path):
    """What the verb looks at to find a run's pictures; the model itself is an exported one."""
    return Path(shutil.copytree(model, tmp_path / "run"))


@pytest.fixture
def served(monkeypatch):
    """The page is not opened, but it is ready at once, and Ctrl-C comes."""
    seen = []

    def serve(app, listening, ready):
        seen.append((app, listening.getsockname()))
        ready()
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "serve", serve)
    return seen


@pytest.fixture
def demo(capsys):
    def call(*words):
        code = main(["demo", *map(str, words), "--workers", "0"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def free_port():
    with server.take_port("127.0.0.1", 0) as taken:
        return taken.getsockname()[1]


def test_the_address_is_printed_and_the_folder_is_gone_at_the_end(demo, model, pictures, served):
    port = free_port()
    code, out, err = demo(model, "--images", pictures, "--port", port)
    assert code == 0, err
    assert "9 pictures with 9 captions" in out
    assert f"The page is at http://127.0.0.1:{port} (Ctrl-C ends it)" in out
    assert out.endswith("The page is closed.\n")
    assert "Everyone" not in out
    (app, address), *_ = served
    assert address == ("127.0.0.1", port)
    assert not app.folder.exists()


def test_a_run_is_searched_in_the_pairs_it_was_evaluated_on(demo, run, pictures, served):
    (run / "config.yaml").write_text(f"evaluate: {{pairs: ['{pictures}']}}\n")
    code, out, err = demo(run, "--port", free_port())
    assert code == 0, err
    assert "9 pictures" in out


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "is not a run that names some"),
        ("evaluate: {every_epochs: 1}", "is not a run that names some"),
        ("evaluate: [", "is not a run that names some"),
        ("evaluate: {pairs: gone/*.tar}", "gone/"),
    ],
)
def test_a_model_that_names_no_pictures_needs_to_be_told_which(demo, run, served, config, words):
    if config is not None:
        (run / "config.yaml").write_text(config)
    code, _, err = demo(run)
    assert code == 1
    assert words in err
    assert "ive --images" in err
    assert not served


def test_a_taken_port_is_told(demo, model, pictures, served):
    with server.take_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        code, out, _ = demo(model, "--images", pictures, "--port", port)
    (_, (_, number)), *_ = served
    assert code == 0
    assert number != port
    assert f"Port {port} is taken; the page takes {number}." in out
    assert f"http://127.0.0.1:{number} " in out


def test_a_page_for_everyone_says_so(demo, model, pictures, served):
    _, out, _ = demo(model, "--images", pictures, "--host", "0.0.0.0", "--port", free_port())
    assert "Everyone who reaches this machine can use the page" in out
    assert "0.0.0.0:" not in out


def test_without_gradio_the_command_to_install_it_is_named(demo, model, pictures, monkeypatch):
    monkeypatch.setattr("fastclip.tools.demo.demo_command.find_spec", lambda name: None)
    code, _, err = demo(model, "--images", pictures)
    assert code == 1
    assert "pip install 'fastclip[demo]'" in err
