"""Remote files, read with fsspec (s3://, gs://, https://, hf://, …) and copied into the cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import IO

import fsspec
from fsspec.registry import known_implementations, registry
from fsspec.utils import get_protocol

from fastclip.checked_files import SMALL, CheckedFile, CheckedWriter, DamagedFile, digests_of, publish
from fastclip.files import build_lock, cache_folder

log = logging.getLogger(__name__)
_checked: set[Path] = set()  # copies that this process has checked


class RemoteError(OSError):
    """A remote file that could not be reached, listed or fetched."""

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path


def is_remote(path: str) -> bool:
    """Whether a path is read with fsspec: s3://, gs://, https://, hf://, …"""
    return "://" in path


def url_problem(url: str) -> str:
    """Why no such file can be fetched; "" if one may be."""
    if "\0" in url or (not url.isascii() and url != url.encode("utf-8", "replace").decode()):
        return "not a possible URL"
    protocol = get_protocol(url)
    return "" if protocol in registry or protocol in known_implementations else "a URL of an unknown protocol"


def local_copy(path: str, version: str = "", *, whole: bool = False) -> Path:
    """The path of a local file, or of the cached copy of this version, fetched on first use.

    A damaged copy is fetched again. Small ones are checked when this process first uses them, large ones if
    `whole`; else their readers check what they read (`checked_copy`).
    """
    if not is_remote(path):
        return Path(path)
    target = _copy_of(path, version)
    if (target in _checked and target.exists() and not whole) or _is_intact(target, whole):
        return target
    with build_lock(target):
        if target.exists() and not digests_of(target).exists():  # of an earlier version of fastclip
            _store(target, lambda: target.open("rb"))
        if not _is_intact(target, whole, warn=True):
            _fetch(path, target)
    _checked.add(target)
    return target


def checked_copy(path: str, version: str) -> CheckedFile | None:
    """The cached copy of a remote file, which checks what is read from it; None for a local file."""
    return CheckedFile(local_copy(path, version)) if is_remote(path) else None


def fetch_again(path: str, version: str, damaged: CheckedFile, error: DamagedFile) -> None:
    """Replace a damaged copy, unless another process did."""
    target = _copy_of(path, version)
    with build_lock(target):
        if damaged.is_in_place():
            log.warning("%s It is fetched again.", error)
            _fetch(path, target)


def _copy_of(path: str, version: str) -> Path:
    digest = hashlib.blake2b(f"{path} {version}".encode(), digest_size=8).hexdigest()
    return cache_folder("remote") / f"{digest}-{path.rsplit('/', 1)[-1]}"


def _is_intact(target: Path, whole: bool, warn: bool = False) -> bool:
    if not target.exists():
        return False
    try:
        CheckedFile(target).check_whole(float("inf") if whole else SMALL)
    except DamagedFile as error:
        if warn:
            log.warning("%s It is fetched again.", error)
        return False
    _checked.add(target)
    return True


def _fetch(path: str, target: Path) -> None:
    try:
        _store(target, fsspec.open(path, "rb").open)
    except Exception as error:  # each protocol's library raises its own
        if isinstance(error, FileNotFoundError):
            raise
        raise RemoteError(f"{path} could not be fetched: {error}", path) from error


def _store(target: Path, open_source: Callable[[], IO[bytes]]) -> None:
    """Copy a stream to a file with digests; the file appears last, and complete."""
    part = target.with_name(target.name + ".part")
    try:
        with open_source() as source, CheckedWriter(part) as copy:
            while data := source.read(1 << 22):
                copy.write(data)
        publish(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        digests_of(part).unlink(missing_ok=True)
        raise


def remote_glob(pattern: str) -> list[str]:
    """List remote files that match a pattern, with their protocol."""
    try:
        file_system, inner = fsspec.core.url_to_fs(pattern)
        return [file_system.unstrip_protocol(name) for name in file_system.glob(inner)]
    except Exception as error:
        raise RemoteError(f"{pattern} could not be listed: {error}", pattern) from error


def remote_stamp(path: str) -> list[str]:
    """A remote file's size and, where the server reports one, its version: they change when the file does."""
    try:
        file_system, inner = fsspec.core.url_to_fs(path)
        info = file_system.info(inner)
    except Exception as error:
        raise RemoteError(f"{path} could not be reached: {error}", path) from error
    version = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("LastModified") or ""
    return [str(info.get("size")), str(version)]
