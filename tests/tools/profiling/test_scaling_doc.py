"""The model's errors in docs/scaling.md are those of its fit."""

from pathlib import Path

from benchmarks.plan_fit import markdown

from fastclip.tools.profiling.network import ERRORS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()


def test_every_cell_stands_in_the_document():
    assert "\n".join(markdown()) in DOCUMENT


def test_so_do_their_means():
    text = " ".join(DOCUMENT.split())
    for size in (ERRORS.step_seen, ERRORS.step_unseen, ERRORS.ratio_unseen, ERRORS.ratio_one):
        assert f"{100 * size.mean:.1f} % (at most {100 * size.largest:.1f} %)" in text
