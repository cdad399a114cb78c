"""Admits only requests that the page itself makes, in front of gradio.

gradio has more routes than the page needs, such as one that fetches files from other sites; and a request
that no browser would make (an odd header, path or body) makes it fail with a traceback in the log. Here it
gets a 400, and at most one line in the log.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from fastclip.tools.demo.limits import MAX_BYTES

log = logging.getLogger(__name__)
_SLACK = 2**20  # bytes of a request besides the uploaded file
_MAX_CALL = 2**20  # bytes of a call of the page
_MAX_URL = 2048  # characters
_API = "/gradio_api/"
_JOIN = _API + "queue/join"
_PAGE = ("/assets/", "/static/", "/svelte/")
_PAGE_FILES = ("/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt")
_CALLS = ("startup-events", "queue/join", "queue/data", "heartbeat/", "upload", "cancel", "reset")
_SESSION = re.compile(r"[\w-]{1,64}", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffd]")
_POLICY = (  # makes the browser block requests to other sites
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'self'"
)
Refusal = tuple[int, str]  # status and reason
_UNREADABLE: Refusal = (400, "This is not a request of the page.")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Admits only requests of the page, and makes the browser block requests to other sites.

    Args:
        folder: of the uploads.
        host: the address that the server listens on.
        calls: for each function of the page, whether each of its inputs is an image.
    """

    def __init__(
        self, app: Callable, folder: Path, host: str, calls: Mapping[int, Sequence[bool]] | None = None
    ):
        self.app, self.folder, self.calls = app, folder.resolve(), calls or {}
        # Against DNS rebinding: another site may resolve its own name to this machine.
        self.hosts = ("localhost", "127.0.0.1", "::1", host) if is_loopback(host) else None

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        refusal = self.refusal(scope)
        if refusal is None and scope["method"] == "POST" and scope["path"] == _JOIN:
            call = rebuilt_call(await _read(receive), self.calls)
            refusal, receive = (_UNREADABLE, receive) if call is None else (None, _sends(call, receive))
        answer = _Answer(send)
        if refusal is None:
            refusal = await self._answered(scope, receive, answer)
        if refusal is not None and not answer.started:
            with suppress(Exception):  # the client may have gone
                await _refuse(send, *refusal)
        return None

    async def _answered(self, scope: dict, receive: Callable, answer: _Answer) -> Refusal | None:
        """Pass the request on; a refusal if it made gradio fail."""
        try:
            await self.app(scope, receive, answer)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.warning("%s %s could not be answered (%s)", scope["method"], scope["path"], reason)
            return _UNREADABLE
        return _UNREADABLE if answer.failed else None

    def refusal(self, scope: dict) -> Refusal | None:
        """Status and reason, or None if the request is admitted."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = unquote(scope.get("query_string", b"").decode("latin-1"))
        if len(scope["path"]) + len(query) > _MAX_URL or _CONTROL.search(scope["path"] + query):
            return _UNREADABLE
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            host_name = urlsplit(f"//{host}").hostname
            other_site = origin is not None and urlsplit(origin).netloc != host
        except ValueError:
            return _UNREADABLE
        if self.hosts is not None and host_name not in self.hosts:
            return 403, "Unknown host name. Open the page at the address that fastclip printed."
        if other_site:
            return 403, "Requests from other sites are not allowed."
        if not self._is_known(scope["path"]):
            return 403, "This path is not available."
        if scope["method"] == "POST":
            length = headers.get("content-length", "")
            if not length.isdecimal():
                return 411, "The Content-Length header is required."
            if int(length) > (_MAX_CALL if scope["path"] == _JOIN else MAX_BYTES + _SLACK):
                return 413, f"Uploads may have at most {MAX_BYTES // 2**20} MiB."
        return None

    def _is_known(self, path: str) -> bool:
        if path.startswith(f"{_API}file="):
            file = path.removeprefix(f"{_API}file=")
            return Path(file).is_absolute() and is_within(file, self.folder)
        return path in _PAGE_FILES or path.startswith((*_PAGE, *(_API + call for call in _CALLS)))


def is_within(path: str | Path, folder: Path) -> bool:
    """Whether the path, with links followed, is in the folder; False if it is not a path at all."""
    try:
        return Path(path).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL, too long, a loop of links
        return False


def rebuilt_call(body: bytes, calls: Mapping[int, Sequence[bool]]) -> bytes | None:
    """A call of one of the page's functions, with nothing else in it; None if it is not one."""
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
        function, session, values = call["fn_index"], call["session_hash"], call["data"]
        pairs = zip(calls[function], values, strict=True)
        data = [_image(value) if image else _value(value) for image, value in pairs]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(session, str) or not _SESSION.fullmatch(session):
        return None
    trigger = call.get("trigger_id")
    rebuilt = {"data": data, "fn_index": int(function), "session_hash": session}
    return json.dumps(rebuilt | {"trigger_id": trigger if isinstance(trigger, int) else None}).encode()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _value(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else _image(value)


def _image(value: Any) -> dict | None:
    """What gradio's image field sends; its other fields are not used."""
    if value is None:
        return None
    path = value["path"]
    if not isinstance(path, str) or len(path) > _MAX_URL or _CONTROL.search(path):
        raise TypeError("not an uploaded image")
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


async def _read(receive: Callable) -> bytes:
    """The body of a request, whose length was checked; as far as it comes, if the client has gone."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
    return body


def _sends(body: bytes, receive: Callable) -> Callable:
    """Receive this body instead, then whatever follows."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_instead() -> dict:
        return parts.pop() if parts else await receive()

    return receive_instead


async def _refuse(send: Callable, status: int, reason: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason.encode()})


class _Answer:
    """Sends an answer with the headers of the policy, and holds back one of status 500."""

    def __init__(self, send: Callable):
        self.send, self.started, self.failed = send, False, False

    async def __call__(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.failed = message["status"] == 500
            self.started = not self.failed
            message = {**message, "headers": [*message.get("headers", []), *_ADDED]}
        if not self.failed:
            await self.send(message)


_ADDED = [
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]
