"""A row of the manifest: where the image and the caption of a pair are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

IN_TAR, IN_FILE, IN_PARQUET = range(3)


class Place(NamedTuple):
    """A row of the manifest."""

    file: int  # number of the shard, table or folder
    kind: int  # IN_TAR, IN_FILE or IN_PARQUET
    image: int  # offset in the tar; offset of the path in strings.bin; row of the Parquet file
    image_size: int
    caption_size: int
    caption: int  # offset in the tar, or in strings.bin


LARGEST_SIZE = (1 << 32) - 1  # bytes of an image or a caption in a tar
ROW = np.dtype({"names": Place._fields, "formats": ["<u4", "<u4", "<u8", "<u4", "<u4", "<u8"]})
