"""Pictures with captions for the page, one of which would run a script if it were not escaped."""

from fastclip.tools.search.index import Index
from tests.data.collections import write_tar
from tests.evaluation import replica

EVIL = """<img src=x onerror="window.ran=1">${window.ran=1}{{window}}"""
COLOURS = ("red", "green", "blue", "black", "white")


def caption(number):
    return EVIL if number == 7 else f"a {COLOURS[number % 5]} thing number {number}"


def write_pictures(path, n=30):
    members = []
    for i in range(n):
        members += [(f"{i:03d}.png", replica.png(i)), (f"{i:03d}.txt", caption(i).encode())]
    return write_tar(path, members)


def open_index(folder, images=None):
    """An index over an untrained model; n pictures with captions unless `images` says otherwise."""
    model = replica.tiny_export(folder)
    return Index.open(str(model), str(images or write_pictures(folder / "pictures.tar")), workers=0)
