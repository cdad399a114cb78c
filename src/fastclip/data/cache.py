"""Where fastclip keeps what it can make again: manifests, decoded collections, copies of remote shards."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from filelock import FileLock


class RemoteError(OSError):
    """A remote file could not be fetched."""


def cache_folder(*parts: str) -> Path:
    """A folder below $FASTCLIP_CACHE, by default ~/.cache/fastclip; made if missing."""
    root = os.environ.get("FASTCLIP_CACHE") or Path.home() / ".cache" / "fastclip"
    folder = Path(root).expanduser().joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def built_once(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` while one process builds it; others wait and find it built."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        yield


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `folder` when all is written, and goes away if not."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def write_whole(path: Path, text: str) -> None:
    """A text file that is there whole, or as it was before."""
    part = aside(path)
    part.write_text(text, encoding="utf-8", newline="\n")
    part.replace(path)


def aside(path: Path) -> Path:
    """Where this process writes what will take the place of `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def is_remote(path: str) -> bool:
    """Whether a path names a file system that fsspec must reach: s3://, gs://, https://, hf://, …"""
    return "://" in path


def local_copy(path: str, version: str = "") -> Path:
    """The file itself if it is local, else the copy of this version in the cache, fetched on first use."""
    if not is_remote(path):
        return Path(path)
    digest = hashlib.blake2b(f"{path} {version}".encode(), digest_size=8).hexdigest()
    target = cache_folder("remote") / f"{digest}-{path.rsplit('/', 1)[-1]}"
    if target.exists():
        return target
    with built_once(target):
        if not target.exists():
            part = target.with_name(target.name + ".part")
            try:
                with fsspec.open(path, "rb") as source, part.open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 22)
            except FileNotFoundError:
                part.unlink(missing_ok=True)
                raise
            except Exception as error:  # each protocol's library has its own
                part.unlink(missing_ok=True)
                raise RemoteError(f"{path} could not be fetched: {error}") from error
            part.rename(target)
    return target


def remote_glob(pattern: str) -> list[str]:
    """Remote files that match a pattern, with their protocol."""
    try:
        file_system, inner = fsspec.core.url_to_fs(pattern)
        return [file_system.unstrip_protocol(name) for name in file_system.glob(inner)]
    except Exception as error:
        raise RemoteError(f"{pattern} could not be listed: {error}") from error


def remote_stamp(path: str) -> list[str]:
    """What changes when a remote file changes: its size and, where the server tells, its version."""
    try:
        file_system, inner = fsspec.core.url_to_fs(path)
        info = file_system.info(inner)
    except Exception as error:
        raise RemoteError(f"{path} could not be reached: {error}") from error
    version = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("LastModified") or ""
    return [str(info.get("size")), str(version)]
