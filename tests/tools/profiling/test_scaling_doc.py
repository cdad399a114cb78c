"""The table of the model's errors in docs/scaling.md is what the model says."""

from pathlib import Path

from fastclip.tools.profiling.fitting import error_table, model_errors, ratio_table

DOCUMENT = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()


def percent(error):
    return f"{100 * error:+.1f} %".replace("-", "−")


def test_every_cell_stands_in_the_document():
    cells = {(c.timing.table, c.timing.nodes, c.timing.algorithm): c for c in error_table()}
    for ratio in ratio_table():
        line = [str(ratio.nodes)]
        for algorithm in ("openclip", "fastclip-v3"):
            cell = cells[ratio.table, ratio.nodes, algorithm]
            line += [f"{cell.timing.total:,.0f}", percent(cell.seen_error), percent(cell.unseen_error)]
        line += [f"{value:.3f}" for value in (ratio.measured, ratio.seen, ratio.unseen)]
        assert f"| {' | '.join(line)} |" in DOCUMENT


def test_so_do_their_sums():
    errors, text = model_errors(), " ".join(DOCUMENT.split())
    for size in (errors.step_seen, errors.step_unseen, errors.ratio_unseen, errors.ratio_one):
        assert f"{100 * size.mean:.1f} % (at most {100 * size.largest:.1f} %)" in text
