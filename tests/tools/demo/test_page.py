"""The page over HTTP: answers, limits, and no access beyond the temporary folder."""

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fastclip.tools.demo.limits import MAX_BYTES, NOT_UPLOADED
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
    """Trigger an event of a field as the browser does; return the outputs, or the error."""
    config = client.get("/config").json()
    numbers = {block["props"].get("elem_id"): block["id"] for block in config["components"]}

    def call(field, event, *data):
        target = [numbers[field], event]
        function = next(d["id"] for d in config["dependencies"] if target in d["targets"])
        request = {"data": data, "fn_index": function, "session_hash": "test"}
        assert client.post("/gradio_api/queue/join", json=request).status_code == 200
        answer = client.get("/gradio_api/queue/data", params={"session_hash": "test"}).text
        messages = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line]
        done = next(message for message in messages if message["msg"] == "process_completed")
        return done["output"]["data"] if done["success"] else done["output"]["error"]

    return call


def uploaded(client, data, name="sent.png"):
    answer = client.post("/gradio_api/upload", files={"files": (name, data)})
    assert answer.status_code == 200, answer.text
    return {"path": answer.json()[0], "orig_name": name, **FILE}


@pytest.mark.slow
def test_a_query_shows_images_and_the_time_it_took(ask, index):
    note, images = ask("query", "submit", "a red heart", 12)
    assert 'role="status"' in note
    assert re.search(r"\d+ ms", note)
    assert images.count("<figure>") == 12
    assert index.by_text("a red heart", 1)[0].name.split("/")[-1] in images


def test_an_empty_query_is_an_alert_and_leaves_the_results(ask):
    note, images = ask("query", "submit", " ", 12)
    assert 'role="alert"' in note
    assert images["__type__"] == "update"
    assert "value" not in images


def test_an_uploaded_image_shows_captions_and_similar_images(ask, client):
    note, captions, similar_note, similar = ask("caption-picture", "change", uploaded(client, replica.png(4)))
    assert 'role="status"' in note
    assert 'role="status"' in similar_note
    assert captions.count("<li>") == similar.count("<figure>") == 12
    assert 'title="004.png"' in similar[:200]


def test_an_uploaded_text_file_is_an_alert(ask, client):
    note, captions, _, similar = ask("caption-picture", "change", uploaded(client, b"text", "text.png"))
    assert 'role="alert"' in note
    assert captions == similar == ""


def test_labels_get_probabilities(ask, client):
    note, bars = ask("classify-picture", "upload", uploaded(client, replica.png(4)), "cat, dog, bird")
    assert 'role="status"' in note
    assert {row["label"] for row in bars["value"]["confidences"]} == {"cat", "dog", "bird"}
    assert sum(row["confidence"] for row in bars["value"]["confidences"]) == pytest.approx(1)


@pytest.mark.parametrize("path", ["/etc/passwd", "http://example.com/a.png", "https://127.0.0.1:1/a.png"])
@pytest.mark.parametrize("field", ["query", "caption-picture", "labels"])
def test_no_request_makes_gradio_copy_a_local_file_or_a_url(ask, folder, field, path):
    before = sorted(folder.rglob("*"))
    named = {"path": path, **FILE}
    event, data = {
        "query": ("submit", [named, 12]),
        "caption-picture": ("change", [named]),
        "labels": ("submit", [None, named]),
    }[field]
    assert ask(field, event, *data) == NOT_UPLOADED
    assert sorted(folder.rglob("*")) == before


def test_uploads_can_be_fetched_and_other_files_cannot(client):
    assert client.get("/gradio_api/file=/etc/passwd").status_code == 403
    sent = uploaded(client, replica.png(5))
    assert client.get(f"/gradio_api/file={sent['path']}").content == replica.png(5)


def test_an_upload_that_is_too_large_is_rejected(client, folder):
    answer = client.post("/gradio_api/upload", files={"files": ("large.png", b"\0" * (MAX_BYTES + 1))})
    assert answer.status_code == 413
    assert not [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > MAX_BYTES]


def test_the_page_loads_nothing_from_other_sites_and_escapes_its_title(client):
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
