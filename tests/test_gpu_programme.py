"""The programme for machines with GPUs, in its short form on a CPU."""

import json

import pytest
from benchmarks import record
from benchmarks.gpu.__main__ import PROGRAMME, main, perform
from benchmarks.gpu.bench import Outcome, Part


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_on_a_cpu_the_short_form_runs_what_it_can_and_lists_the_rest(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert main(["--short", "--device", "cpu"]) == 0
    saved = json.loads((tmp_path / "gpu-short.json").read_text())
    assert saved["command"] == "python -m benchmarks.gpu --short --device cpu"
    figures = saved["figures"]
    assert (figures["device"], figures["short"]) == ("cpu", True)
    results = {name: part["result"] for name, part in figures["parts"].items()}
    assert results == {
        part.name: {"nothing": "ok", "two GPUs": "ok"}.get(part.needs, f"needs {part.needs}")
        for part in PROGRAMME
    }
    killed = figures["parts"]["killed rank"]
    assert killed["exit_code_of_the_other_rank"] not in (0, 75)
    assert figures["parts"]["two ranks"]["loss_difference"] < 1e-5
    out = capsys.readouterr().out
    assert all(part.name in out for part in PROGRAMME)


def test_a_part_that_raises_fails_alone(monkeypatch, tmp_path):
    def broken(bench):
        raise RuntimeError("CUDA error")

    class Machine:
        def lacks(self, needs):
            return needs == "a GPU"

    outcome, _ = perform(Part("one", "…", "nothing", broken), Machine())
    assert outcome == Outcome(False, "RuntimeError: CUDA error", {})
    assert perform(Part("two", "…", "a GPU", broken), Machine()) == (None, 0.0)
