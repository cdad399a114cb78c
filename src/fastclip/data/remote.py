"""Remote files, read with fsspec (s3://, gs://, https://, hf://, …) and copied into the cache."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import fsspec

from fastclip.files import build_lock, cache_folder


class RemoteError(OSError):
    """A remote file that could not be reached, listed or fetched."""

    def __init__(self, message: str, path: str = ""):
        super().__init__(message)
        self.path = path


def is_remote(path: str) -> bool:
    """Whether a path is read with fsspec: s3://, gs://, https://, hf://, …"""
    return "://" in path


def local_copy(path: str, version: str = "") -> Path:
    """The path of a local file, or of the cached copy of this version, fetched on first use."""
    if not is_remote(path):
        return Path(path)
    digest = hashlib.blake2b(f"{path} {version}".encode(), digest_size=8).hexdigest()
    target = cache_folder("remote") / f"{digest}-{path.rsplit('/', 1)[-1]}"
    if target.exists():
        return target
    with build_lock(target):
        if not target.exists():
            part = target.with_name(target.name + ".part")
            try:
                with fsspec.open(path, "rb") as source, part.open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 22)
            except Exception as error:  # each protocol's library raises its own
                part.unlink(missing_ok=True)
                if isinstance(error, FileNotFoundError):
                    raise
                raise RemoteError(f"{path} could not be fetched: {error}", path) from error
            part.rename(target)
    return target


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
