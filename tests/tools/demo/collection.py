"""Images with captions, one of which would run a script if it were not escaped."""

from fastclip.tools.search.index import Index
from tests.data.collections import write_tar
from tests.evaluation import replica

EVIL = """<img src=x onerror="window.ran=1">${window.ran=1}{{window}}"""
COLOURS = ("red", "green", "blue", "black", "white")


def caption(number):
    return EVIL if number == 7 else f"a {COLOURS[number % 5]} thing number {number}"


def write_images(path, n=30):
    members = []
    for i in range(n):
        members += [(f"{i:03d}.png", replica.png(i)), (f"{i:03d}.txt", caption(i).encode())]
    return write_tar(path, members)


def open_index(folder, images=None):
    """An index with an untrained model, of these images or of 30 with captions."""
    model = replica.tiny_export(folder)
    return Index.open(str(model), str(images or write_images(folder / "images.tar")), workers=0)
