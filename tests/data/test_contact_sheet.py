"""Contact sheets: each image in its cell, uncropped and undistorted, with any text below it."""

import numpy as np
import pytest
from PIL import Image

from fastclip.data.contact_sheet import CELL, TEXT, draw_contact_sheet

GREY = (211, 211, 211)


def sheet_of(tmp_path, cells, **options):
    draw_contact_sheet(cells, tmp_path / "new" / "sheet.png", **options)
    return np.asarray(Image.open(tmp_path / "new" / "sheet.png"))


def cell(sheet, row, column):
    return sheet[row * (CELL + TEXT) :, column * CELL :][:CELL, :CELL]


def text(sheet, row, column):
    return sheet[row * (CELL + TEXT) + CELL :, column * CELL :][:TEXT, :CELL]


@pytest.mark.parametrize(
    ("count", "columns", "rows"), [(0, 1, 1), (1, 1, 1), (4, 4, 1), (6, 6, 1), (7, 6, 2)]
)
def test_sheet_is_as_large_as_its_images_need(tmp_path, count, columns, rows):
    sheet = sheet_of(tmp_path, [(Image.new("RGB", (8, 8), "red"), "x")] * count)
    assert sheet.shape == (rows * (CELL + TEXT), columns * CELL, 3)


def test_images_go_from_left_to_right_and_top_to_bottom(tmp_path):
    colours = [(10 * i, 250 - 10 * i, 7) for i in range(5)]
    sheet = sheet_of(tmp_path, [(Image.new("RGB", (9, 9), colour), "") for colour in colours], columns=3)
    for i, colour in enumerate(colours):
        assert tuple(cell(sheet, i // 3, i % 3)[CELL // 2, CELL // 2]) == colour
    assert (cell(sheet, 1, 2) == 255).all()


@pytest.mark.parametrize("size", [(300, 100), (100, 300), (1, 1), (2000, 1)])
def test_image_keeps_its_aspect_ratio_and_is_centred(tmp_path, size):
    shown = cell(sheet_of(tmp_path, [(Image.new("RGB", size, "red"), "")]), 0, 0)
    ys, xs = np.nonzero((shown == (255, 0, 0)).all(axis=2))
    side = CELL - 12
    wide, high = (max(1, round(s * side / max(size))) for s in size)
    assert (np.ptp(xs) + 1, np.ptp(ys) + 1) == (wide, high)
    assert abs(xs.mean() - (CELL - 1) / 2) <= 1
    assert abs(ys.mean() - (CELL - 1) / 2) <= 1


def test_white_image_has_a_frame(tmp_path):
    shown = cell(sheet_of(tmp_path, [(Image.new("RGB", (9, 9), "white"), "")]), 0, 0)
    assert (shown == GREY).all(axis=2).sum() == 4 * (CELL - 12) + 4


def test_cell_without_an_image_has_its_text(tmp_path):
    sheet = sheet_of(tmp_path, [(None, "[truncated JPEG]")])
    assert (cell(sheet, 0, 0) == 255).all()
    assert (text(sheet, 0, 0) < 128).any()


def test_newlines_break_lines_and_only_three_are_shown(tmp_path):
    one = text(sheet_of(tmp_path, [(None, "0.839")]), 0, 0)
    two = text(sheet_of(tmp_path, [(None, "0.839\na.png")]), 0, 0)
    three = text(sheet_of(tmp_path, [(None, "0.839\na.png\nb")]), 0, 0)
    four = text(sheet_of(tmp_path, [(None, "0.839\na.png\nb\nc")]), 0, 0)
    assert (one[:12] == two[:12]).all()
    assert (one[14:] == 255).all()
    assert (two[14:24] < 128).any()
    assert (three == four).all()


@pytest.mark.parametrize("name", ["猫.png", "❤️", "x" * 500, "a b " * 200, "", "\n\n", "tab\there"])
def test_any_text_stays_below_its_image(tmp_path, name):
    sheet = sheet_of(tmp_path, [(None, name), (None, "")])
    assert (cell(sheet, 0, 0) == 255).all()
    assert (text(sheet, 0, 1) == 255).all()  # the neighbour's
