"""Open files that others named, and only plain ones: a FIFO waits for a writer, a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from os import PathLike
from typing import BinaryIO

from fastclip.data.images import UnusableSample
from fastclip.data.pairs import NOT_A_FILE

BAD_NAME = "not a possible file name"
# Errors of a path, not of the disk or the network
ERRORS_OF_A_NAME = frozenset((errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO))


class NotAFile(OSError):
    """A path of something else than a plain file, which `reason` names."""

    def __init__(self, path: str, reason: str = ""):
        super().__init__(f"{path} is {reason}." if reason else path)
        self.path, self.reason = path, reason


def not_a_file(mode: int) -> str:
    """The reason why a path with this mode cannot be read: "a FIFO, not a file"; "" for a plain file."""
    return "" if stat.S_ISREG(mode) else NOT_A_FILE.get(stat.S_IFMT(mode), "not a file")


def open_plain(path: str | PathLike[str]) -> BinaryIO:
    """Open a plain file; NotAFile for anything else, which is not opened, or at once closed again."""
    _require_plain(os.stat(path).st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it may have become a FIFO since
    try:
        _require_plain(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_image_file(path: str | PathLike[str]) -> bytes:
    """The bytes of an image file; UnusableSample if its name is none, or it is a folder or a FIFO."""
    try:
        with open_plain(path) as stream:
            return stream.read()
    except (FileNotFoundError, PermissionError):
        raise  # counted as they are
    except NotAFile as error:
        raise UnusableSample(error.reason) from None
    except ValueError:  # a NUL, or half of a character
        raise UnusableSample(BAD_NAME) from None
    except OSError as error:
        if error.errno in ERRORS_OF_A_NAME:
            raise UnusableSample(f"its file cannot be opened: {error.strerror}") from None
        raise


def _require_plain(mode: int, path: str | PathLike[str]) -> None:
    if reason := not_a_file(mode):
        raise NotAFile(os.fspath(path), reason)
