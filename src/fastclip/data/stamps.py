"""What tells whether a file of a collection has changed since it was indexed."""

from __future__ import annotations

import json
import os
from hashlib import blake2b

from fastclip.data.index_files import stat_of
from fastclip.data.pairs import File
from fastclip.data.remote import is_remote, remote_stamp
from fastclip.data.sources import list_folder


def stamp_of(file: File) -> list[str]:
    """Size and time of a file, or a digest of those of all files in a folder: changes when a file does."""
    if is_remote(file.path):
        return remote_stamp(file.path)
    if file.kind != "folder":
        return stat_of(file.path)
    return [digest([[name, *stat_of(os.path.join(file.path, name))] for name in list_folder(file.path)])]


def size_of(stamp: list[str]) -> int:
    """The bytes of a file; 0 if its stamp is that of a folder, or a server did not report them."""
    return int(stamp[0]) if len(stamp) == 2 and stamp[0].isdecimal() else 0


def version_of(path: str, stamp: list[str]) -> str:
    """The version of a remote file, which names its copy in the cache."""
    return " ".join(stamp) if is_remote(path) else ""


def digest(thing: object) -> str:
    """Hash anything that can be written as JSON."""
    return blake2b(json.dumps(thing).encode(), digest_size=16).hexdigest()
