"""The page as its server gives it: answers over HTTP, limits, and no way out of the temporary folder."""

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fastclip.tools.demo.limits import MAX_BYTES
from fastclip.tools.demo.server import temporary_folder
from tests.evaluation import replica
from tests.tools.demo.collection import open_index

FILE = {"meta": {"_type": "gradio.FileData"}}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return open_index(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def folder():
    with temporary_folder() as name:
        yield name


@pytest.fixture(scope="module")
def client(index, folder):
    from fastclip.tools.demo.page import build_app

    app = build_app(index, "tiny <b>model</b>", folder, "127.0.0.1")
    with TestClient(app, base_url="http://127.0.0.1:7860") as client:
        yield client


@pytest.fixture
def ask(client):
    """Calls what happens at an event of a field, as the browser does; gives what comes out, or the error."""
    config = client.get("/config").json()
    numbers = {block["props"].get("elem_id"): block["id"] for block in config["components"]}

    def call(field, event, *data):
        target = [numbers[field], event]
        function = next(d["id"] for d in config["dependencies"] if target in d["targets"])
        question = {"data": data, "fn_index": function, "session_hash": "test"}
        assert client.post("/gradio_api/queue/join", json=question).status_code == 200
        answer = client.get("/gradio_api/queue/data", params={"session_hash": "test"}).text
        messages = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line]
        done = next(message for message in messages if message["msg"] == "process_completed")
        return done["output"]["data"] if done["success"] else done["output"]["error"]

    return call


def uploaded(client, data, name="sent.png"):
    answer = client.post("/gradio_api/upload", files={"files": (name, data)})
    assert answer.status_code == 200, answer.text
    return {"path": answer.json()[0], "orig_name": name, **FILE}


def test_words_give_pictures_and_a_note(ask, index):
    note, found = ask("query", "submit", "a red heart", 12)
    assert "Pictures that fit best" in note
    assert found.count("<figure>") == 12
    assert index.by_text("a red heart", 1)[0].name.split("/")[-1] in found


def test_an_empty_query_is_told_and_leaves_the_results(ask):
    note, found = ask("query", "submit", " ", 12)
    assert 'role="alert">Type what' in note
    assert found["__type__"] == "update"
    assert "value" not in found


def test_an_uploaded_picture_gives_captions_and_pictures(ask, client):
    note, captions, like_note, like = ask("caption-picture", "change", uploaded(client, replica.png(4)))
    assert "Captions that fit best" in note
    assert captions.count("<li>") == like.count("<figure>") == 12
    assert "most like it" in like_note
    assert 'title="004.png"' in like[:200]


def test_a_text_file_is_told_to_be_no_picture(ask, client):
    note, captions, _, like = ask("caption-picture", "change", uploaded(client, b"words", "words.png"))
    assert 'role="alert">This picture cannot be used: not an image' in note
    assert captions == like == ""


def test_labels_give_probabilities(ask, client):
    note, bars = ask("classify-picture", "upload", uploaded(client, replica.png(4)), "cat, dog, bird")
    assert "Probabilities" in note
    assert sum(row["confidence"] for row in bars["value"]["confidences"]) == pytest.approx(1)


@pytest.mark.parametrize("path", ["/etc/passwd", "http://example.com/a.png", "https://127.0.0.1:1/a.png"])
@pytest.mark.parametrize("field", ["query", "caption-picture", "labels"])
def test_no_question_brings_a_file_of_the_machine_or_of_another_site_into_reach(ask, folder, field, path):
    before = sorted(folder.rglob("*"))
    named = {"path": path, **FILE}
    event, data = {
        "query": ("submit", [named, 12]),
        "caption-picture": ("change", [named]),
        "labels": ("submit", [None, named]),
    }[field]
    assert ask(field, event, *data) == "Only pictures that were uploaded here can be used."
    assert sorted(folder.rglob("*")) == before


def test_files_of_the_machine_cannot_be_fetched_and_uploads_can(client):
    assert client.get("/gradio_api/file=/etc/passwd").status_code == 403
    sent = uploaded(client, replica.png(5))
    assert client.get(f"/gradio_api/file={sent['path']}").content == replica.png(5)


def test_too_large_an_upload_is_refused(client, folder):
    answer = client.post("/gradio_api/upload", files={"files": ("large.png", b"\0" * (MAX_BYTES + 1))})
    assert answer.status_code == 413
    assert not [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > MAX_BYTES]


def test_the_page_names_no_other_site_to_load_from_and_escapes_its_title(client):
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert "fonts.g" not in answer.text + client.get("/theme.css").text
    assert "<b>model</b>" not in answer.text
    config = client.get("/config").json()
    assert config["analytics_enabled"] is False


def test_gradio_writes_nothing_beside_the_page(client):
    from fastclip.tools.demo import page

    assert not Path(page.__file__).with_suffix(".pyi").exists()
