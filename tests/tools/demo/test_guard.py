"""The requests that the guard admits; odd ones get a 400, also from the real server, and no traceback."""

import asyncio
import http.client
import json
import signal
import socket
from pathlib import Path

import pytest

from fastclip.tools.demo.guard import Guard, is_loopback, is_within, rebuilt_call
from fastclip.tools.demo.limits import MAX_BYTES
from tests.data.hostile_images import HOSTILE_IMAGES, scans
from tests.evaluation import replica
from tests.tools.demo.collection import write_images
from tests.tools.demo.served import Served

FILE = "/gradio_api/file="


def ask(path, method="GET", host="127.0.0.1:7860", listens_on="127.0.0.1", folder="/nowhere", **headers):
    """The status of a refused request; None if it is admitted."""
    named = {"host": host} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "headers": [(name.encode(), str(value).encode()) for name, value in named.items()],
    }
    refusal = Guard(lambda *_: None, Path(folder), listens_on).refusal(scope)
    return refusal and refusal[0]


@pytest.mark.parametrize("path", ["/", "/config", "/theme.css", "/assets/x.js", "/gradio_api/queue/data"])
def test_requests_of_the_page_are_admitted(path):
    assert ask(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/proxy=http://example.com/",
        "/gradio_api/process_recording",
        "/gradio_api/vibe-edit",
        "/gradio_api/run/predict",
        "/monitoring",
        "/docs",
        "/anything",
    ],
)
def test_routes_that_the_page_does_not_need_are_closed(path):
    assert ask(path) == 403


def test_only_uploads_can_be_fetched(tmp_path):
    folder, secret = tmp_path / "uploads", tmp_path / "secret.txt"
    folder.mkdir()
    secret.write_text("secret")
    (folder / "own.png").write_bytes(b"")
    (folder / "link.png").symlink_to(secret)
    assert ask(f"{FILE}{folder}/own.png", folder=folder) is None
    for path in ("/etc/passwd", secret, f"{folder}/../secret.txt", f"{folder}/link.png", "pyproject.toml"):
        assert ask(f"{FILE}{path}", folder=folder) == 403
    assert ask(f"{FILE}http://example.com/", folder=folder) == 403


def test_other_host_names_and_other_sites_are_refused():
    assert ask("/", host="evil.example:7860") == 403
    assert ask("/", host="localhost:7860") is None
    assert ask("/", host="evil.example:7860", listens_on="0.0.0.0") is None
    assert ask("/", origin="http://127.0.0.1:7860") is None
    for listens_on in ("127.0.0.1", "0.0.0.0"):
        assert ask("/", origin="http://evil.example", listens_on=listens_on) == 403


def test_requests_that_are_too_large_or_of_unknown_length_are_refused():
    upload = "/gradio_api/upload"
    assert ask(upload, "POST", content_length=MAX_BYTES) is None
    assert ask(upload, "POST", content_length=MAX_BYTES + 2**20 + 1) == 413
    assert ask(upload, "POST") == 411


def test_loopback_addresses_are_recognised():
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.0.0.9")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.2", "example.com")))


@pytest.mark.parametrize(
    "changed",
    [
        *({"host": host} for host in ("[", "]", "[::1", "[x]:1", "a]b")),
        *({"origin": origin} for origin in ("http://[", "http://a]b", "http://[x]")),
        *(
            {"path": f"/{text}"}
            for text in ("\0", "assets/\0", "assets/\x1b[2J", "assets/\ufffd", "a" * 3000)
        ),
        *({"path": FILE + text} for text in ("/tmp/\0", "/" + "a" * 5000, "/\ud800", "\0")),
    ],
)
def test_hosts_origins_and_paths_that_no_browser_sends_get_a_400(changed):
    assert ask(**{"path": "/"} | changed) == 400


def test_a_path_that_the_system_does_not_take_is_in_no_folder(tmp_path):
    for path in (
        "a\0b",
        "a" * 5000,
        "\ud800",
        tmp_path / ".." / "x",
        tmp_path / "loop" / "x" / ".." / ".." / "..",
    ):
        assert not is_within(path, tmp_path)
    assert is_within(tmp_path / "a", tmp_path)


SENT = {"path": "/tmp/a.png", "url": "http://evil", "meta": {"_type": "gradio.FileData"}}
CALLS = {0: [False, False], 1: [True]}


def test_a_call_is_passed_on_with_nothing_but_what_the_page_sends():
    body = {"data": ["a cat", 12], "fn_index": 0, "session_hash": "x1", "trigger_id": 3, "event_id": "z"}
    rebuilt = json.loads(rebuilt_call(json.dumps(body).encode(), CALLS))
    assert rebuilt == {"data": ["a cat", 12], "fn_index": 0, "session_hash": "x1", "trigger_id": 3}
    upload = rebuilt_call(json.dumps({"data": [SENT], "fn_index": 1, "session_hash": "x"}).encode(), CALLS)
    assert json.loads(upload)["data"] == [{"path": "/tmp/a.png", "meta": {"_type": "gradio.FileData"}}]


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"3", b"\0", b"\xff", b"[" * 100_000, "{}".encode("utf-16")),
        *(
            json.dumps({"data": ["a", 12], "fn_index": 0, "session_hash": "x"} | changed).encode()
            for changed in (
                *({"fn_index": value} for value in (-1, 9, "0", None, [0], 10**30)),
                *({"session_hash": value} for value in (None, 3, "", "a/b", "\ud800", "x" * 99)),
                *({"data": value} for value in (None, [], ["a"], ["a", [3]], ["a", {}], {"a": 1}, 3)),
                *({"fn_index": 1, "data": [value]} for value in (3, "a", {"path": None}, {"path": "a\0b"})),
                {"data": [float("nan"), 12]},
            )
        ),
    ],
)
def test_a_body_that_is_not_a_call_of_the_page_is_refused(body):
    assert rebuilt_call(body, CALLS) is None


def test_what_makes_gradio_fail_gets_a_400_and_one_line_in_the_log(caplog):
    async def failing(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"Internal Server Error"})
        raise ValueError("embedded null byte")

    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"127.0.0.1")]
    scope = {"type": "http", "path": "/", "method": "GET", "headers": headers}
    asyncio.run(Guard(failing, Path("/nowhere"), "127.0.0.1")(scope, None, send))
    assert [message.get("status") for message in sent] == [400, None]
    (record,) = caplog.records
    assert "embedded null byte" in record.getMessage()
    assert record.exc_info is None


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    images = write_images(folder / "images.tar", n=9)
    demo = Served(replica.tiny_export(folder), images, folder / "temporary")
    yield demo
    demo.end(signal.SIGTERM)  # checks that there is no traceback in its log


def status(served, request):
    """The status of the answer to these bytes."""
    host, port = served.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request.replace(b"HOST", f"{host}:{port}".encode()))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status


def post(path, body, kind="application/json", length=None):
    head = f"POST {path} HTTP/1.1\r\nHost: HOST\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode("latin-1") + body


def part(disposition):
    return f"--a\r\nContent-Disposition: form-data; {disposition}\r\n\r\nx\r\n--a--\r\n".encode("latin-1")


JOIN, UPLOAD, FORM = "/gradio_api/queue/join", "/gradio_api/upload", "multipart/form-data; boundary="
ODD = [
    *(
        f"GET / HTTP/1.1\r\n{header}\r\nConnection: close\r\n\r\n".encode("latin-1")
        for header in (
            *("X: y", "Host: [", "Host: [x]:1", "Host: a\0b", "Host: \xff\xfe", "Host: HOST\r\nHost: HOST"),
            *(f"Host: HOST\r\nOrigin: {origin}" for origin in ("http://[", "http://a]b", "null", "\xff")),
            *("Host: HOST\r\nX", "Host: HOST\r\nX: \0"),
        )
    ),
    *(
        f"GET {path} HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n".encode()
        for path in (
            *(
                "/%00",
                "/assets/%00",
                "/assets/%ff",
                "/assets/%2e%2e/%2e%2e/etc/passwd",
                "/static/" + "a" * 5000,
            ),
            *(f"{FILE}/tmp/%00", f"{FILE}/{'a' * 5000}", f"{FILE}/tmp/%ed%a0%80", "/" + "a" * 70_000),
            *("/?deep_link=%00", "/gradio_api/heartbeat/%00", "/gradio_api/queue/data?session_hash=%00"),
        )
    ),
    *(post(JOIN, body) for body in (b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"data":[]}')),
    *(
        post(JOIN, json.dumps({"session_hash": "s", "data": data, "fn_index": number}).encode())
        for number, data in ((10**9, []), (-1, []), ("a", []), (0, []), (0, [[3], 12]), (0, [{}, 12]))
    ),
    *(post(JOIN, b"{}", length=length) for length in ("abc", "-1", "9" * 30, "+2", "\xb2")),
    *(post(UPLOAD, b"x", FORM + boundary) for boundary in ("", "a", "a" * 2000, "\xff")),
    *(post(UPLOAD, part(name), FORM + "a") for name in ('name="files"', "")),
    *(b"GET /\r\n\r\n", b"BREW / HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n", bytes(range(256)) * 4),
    b"POST /gradio_api/queue/join HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]


@pytest.mark.slow
def test_the_real_server_answers_odd_requests_with_a_status_below_500(served):
    for request in ODD:
        assert 400 <= status(served, request) < 500, request[:200]
    assert status(served, b"GET / HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n") == 200
    assert "Traceback" not in served.log.read_text()


@pytest.mark.slow
def test_the_real_server_rejects_an_upload_that_would_block_it_and_answers_the_next_one(served):
    hostile, reason = HOSTILE_IMAGES["jpeg of 10,000 scans"]
    for data, role, words in (
        (hostile(), "alert", reason),
        (scans(5_000, 2_000, 2_000), "alert", "100 scans"),
        (replica.png(4), "status", "Best captions"),
    ):
        note = captions_note(served, data)
        assert f'role="{role}"' in note
        assert words in note
    assert "Traceback" not in served.log.read_text()


def captions_note(served, data):
    """Upload an image and ask for its captions, as the page does; the note that is shown."""
    page = http.client.HTTPConnection(served.address.removeprefix("http://"), timeout=300)

    def call(method, path, body=None, kind="application/json"):
        page.request(method, path, body, {"Content-Type": kind})
        answer = page.getresponse()
        assert answer.status == 200
        return answer.read()

    head = b'--a\r\nContent-Disposition: form-data; name="files"; filename="a.jpg"\r\n\r\n'
    (path,) = json.loads(call("POST", UPLOAD, head + data + b"\r\n--a--\r\n", FORM + "a"))
    config = json.loads(call("GET", "/config"))
    field = next(c["id"] for c in config["components"] if c["props"].get("elem_id") == "caption-picture")
    number = next(d["id"] for d in config["dependencies"] if [field, "change"] in d["targets"])
    file = {"path": path, "meta": {"_type": "gradio.FileData"}}
    call("POST", JOIN, json.dumps({"data": [file], "fn_index": number, "session_hash": "s"}))
    events = call("GET", "/gradio_api/queue/data?session_hash=s").decode().split("\n\n")
    messages = [json.loads(event.removeprefix("data: ")) for event in events if event.strip()]
    done = next(message for message in messages if message["msg"] == "process_completed")
    return done["output"]["data"][0]
