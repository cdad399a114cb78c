"""The display of a run: plain lines in a pipe, a panel on a terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from fastclip.training.display import Display, Plan
from tests.terminals import Terminal

V3 = {
    "step": 620,
    "epoch": 2.3846,
    "samples": 158_720,
    "loss": 3.41217,
    "radius": 3.9123,
    "tau": 0.06512,
    "gamma": 1.0,
    "lr": 1e-3,
    "tau_lr": 1e-4,
    "grad_norm": 1.2345,
    "unvisited": 0.537,
    "skipped": 0,
    "bad": 0,
    "time": {"elapsed": 62.0, "samples_per_second": 1240.3, "data_wait": 0.03, "step": 0.2},
}
OPENCLIP = {key: value for key, value in V3.items() if key not in ("radius", "gamma", "unvisited")}


def evaluation(step, value, best):
    values = {"retrieval/image_to_text_r1": value, "zero_shot/noto_top1": value + 0.5}
    return {"step": step, "epoch": step / 260, "evaluation": values, "best": best}


def plan(**changes):
    values = {
        "run": Path("runs/emoji"),
        "title": "fastclip-v3 · vit-emoji · [emoji]",
        "total_steps": 5200,
        "epochs": 20,
        "steps_per_epoch": 260.0,
        "global_batch": 256,
        "rho": 4.4,
        "ranks": 2,
    }
    return Plan(**(values | changes))


def test_the_last_batch_may_extend_into_the_next_epoch(clock):
    """14,606 pairs in batches of 32 for 20 epochs: 9,129 steps are a little more than 20 epochs."""
    shown = plan(total_steps=9129, epochs=20, steps_per_epoch=14_606 / 32)
    stream = io.StringIO()
    display = Display(shown, [], console=Console(file=stream, force_terminal=True, width=100), clock=clock)
    for step in (0, 9100, 9129):
        display.tick(step)
        display._move_bars()
        (name,) = (task.description for task in display.view.tasks if "epoch" in task.description)
        assert name == f"epoch {1 if step == 0 else 20}/20"
    display.close()


@pytest.fixture
def live(clock):
    """Make live displays on a terminal that records what it is sent; close them at the end."""
    made = []

    def make(width=80, evaluations=(), **changes):
        console = Console(file=Terminal(), width=width, height=50, _environ={"TERM": "xterm"})
        made.append(Display(plan(**changes), list(evaluations), console=console, clock=clock))
        return made[-1]

    yield make
    for display in made:
        display.close()


def panel(display):
    console = Console(file=io.StringIO(), record=True, width=display.view.console.width)
    console.print(display.view.get_renderable())
    return console.export_text(styles=False).splitlines()


def styled(display, text):
    """The styles of a text in the panel."""
    console = Console(width=120)
    segments = console.render(display.view.get_renderable())
    return {str(segment.style) for segment in segments if segment.text.strip() == text}


def test_a_plain_line_has_all_values_of_the_algorithm(clock, capsys):
    display = Display(plan(), [], clock=clock)
    display.tick(500)
    clock.now += 60
    display.log(V3)
    assert "eta 38 min 10 s" in capsys.readouterr().err  # 120 steps took a minute, 4,580 remain
    display.log(V3 | {"step": 5200, "epoch": 20.0, "skipped": 1, "bad": 3})
    line = capsys.readouterr().err.strip()
    fields = [field.strip() for field in line.split("  ") if field]
    assert fields == [
        "step 5200/5200",
        "epoch 20.00/20",
        "loss 3.412",
        "tau 0.0651",
        "gamma 1.00",
        "lr 1.0e-03",
        "radius 3.91→4.40",
        "unvisited 54%",
        "1,240 samples/s",
        "data 3%",
        "eta 0 s",
        "skipped 1",
        "bad 3",
    ]


def test_plain_lines_are_aligned_and_start_with_a_step_to_grep(clock, capsys):
    display = Display(plan(), [], clock=clock)
    for step in (1, 620, 5200):
        clock.now += 10
        display.log(V3 | {"step": step, "epoch": step / 260, "loss": -10.0 * step, "radius": 1 - step / 1000})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == [
        "step 1/5200",
        "step 620/5200",
        "step 5200/5200",
    ]
    for name in ("epoch ", "loss ", "tau ", "gamma ", "lr ", "radius ", "step "):
        assert len({line.index(name) for line in lines}) == 1, name


def test_a_plain_line_of_openclip_omits_values_it_lacks(clock, capsys):
    display = Display(plan(rho=None), [], clock=clock)
    display.log(OPENCLIP | {"grad_norm": None, "tau": None})
    line = capsys.readouterr().err
    assert "loss 3.412" in line
    assert "eta –" in line
    for absent in ("radius", "gamma", "unvisited", "tau", "skipped", "bad", "None"):
        assert absent not in line


def test_plain_lines_are_printed_every_two_seconds_and_for_the_first_and_last_record(clock, capsys):
    display = Display(plan(total_steps=100), [], clock=clock)
    for step in range(1, 96):  # ten per second
        clock.now += 0.1
        display.log(V3 | {"step": step})
    display.close()
    display.close()
    steps = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().err.splitlines()]
    assert steps == [1, 21, 41, 61, 81, 95]


def test_a_plain_evaluation_follows_the_record_before_it(clock, capsys):
    display = Display(plan(), [], clock=clock)
    display.log(V3)
    display.log(V3 | {"step": 630})
    display.evaluated(evaluation(630, 0.1234, best=True))
    display.evaluated(evaluation(640, float("nan"), best=False))
    display.message("some message")
    lines = capsys.readouterr().err.splitlines()
    assert [line[:8] for line in lines] == ["step 620", "step 630", "evaluati", "evaluati", "some mes"]
    assert "retrieval/image_to_text_r1 0.1234  zero_shot/noto_top1 0.6234  best" in lines[2]
    assert "nan" in lines[3]
    assert "best" not in lines[3]


def test_ticks_draw_at_most_twice_per_second(clock, live):
    display = live()
    terminal = display.view.console.file
    drawn_at_start = terminal.getvalue().count("╭")
    for step in range(1, 1001):  # 100 per second
        clock.now += 0.01
        display.tick(step)
        display.log(V3 | {"step": step})
    assert 19 <= terminal.getvalue().count("╭") - drawn_at_start <= 21
    assert display.step == 1000


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_panel_has_every_value_and_fits(clock, live, width):
    display = live(width, evaluations=[evaluation(520, 0.1302, True), evaluation(600, 0.1234, False)])
    display.tick(600)
    clock.now += 10
    display.log(V3)
    lines = panel(display)
    assert {len(line) for line in lines} == {min(width, 120)}
    assert len(lines) <= 16
    text = " ".join(" ".join(lines).split())
    for shown in (
        "fastclip-v3 · vit-emoji · [emoji]",
        "2 ranks · batch 256 · runs/emoji",
        "epoch 3/20",
        "38% 100/260 steps eta 1 min 20 s",
        "12% 620/5,200 steps eta 38 min 10 s",
        "loss 3.412",
        "temperature τ 0.0651",
        "inner rate γ 1.00",
        "radius → ρ 3.91 → 4.40",
        "learning rate 1.00e-03",
        "gradient norm 1.234",
        "unvisited 53.7%",
        "samples/s 1,240",
        "data wait 3%",
        "skipped 0",
        "bad samples 0",
        "elapsed 10 s",
        "step 600 best: step 520",
        "retrieval/image_to_text_r1 0.1234 0.1302",
        "zero_shot/noto_top1 0.6234 0.6302",
    ):
        assert shown in text
    assert "…" not in text


def test_a_panel_of_openclip_has_no_gaps(live):
    display = live(rho=None)
    display.log(OPENCLIP)
    lines = panel(display)
    assert "loss 3.412 temperature τ 0.0651 learning rate 1.00e-03" in " ".join(lines[6].split())
    assert not any("radius" in line or "inner" in line or "unvisited" in line for line in lines)


def test_long_names_are_cut_and_large_numbers_fit(live):
    run = Path("/a" * 80)
    display = live(run=run, title="x · " * 40, total_steps=5_000_000, steps_per_epoch=123_456.5, ranks=128)
    spent = {"samples_per_second": 1_234_567.0, "data_wait": 1.0}
    display.log(V3 | {"step": 1_234_567, "loss": -1e9, "radius": -0.12, "bad": 1_234_567, "time": spent})
    lines = panel(display)
    assert {len(line) for line in lines} == {80}
    text = " ".join(lines)
    for shown in ("1,234,567/5,000,000 steps", "-1.00e+09", "-0.12 → 4.40", "bad samples   1,234,567"):
        assert shown in text


def test_only_values_that_need_attention_are_highlighted(live):
    display = live()
    display.log(V3 | {"bad": 0, "skipped": 0})
    assert styled(display, "3%") == styled(display, "0") == {"bold"}
    spent = V3["time"] | {"data_wait": 0.35}
    display.log(V3 | {"bad": 17, "skipped": 2, "loss": float("nan"), "time": spent})
    for text in ("35%", "17", "2", "nan"):
        assert styled(display, text) == {"bold yellow"}


def test_the_last_step_fills_both_bars(live):
    display = live(total_steps=650, epochs=2.5)
    display.tick(650)
    text = " ".join(panel(display))
    assert "epoch 3/3" in text
    assert text.count("100%") == 2
    assert "130/130 steps" in text


def test_only_the_first_metrics_are_shown_including_nulls_of_a_resumed_run(live):
    metrics = {f"zero_shot/task_{i}": None for i in range(10)}
    display = live(evaluations=[{"step": 10, "epoch": 0.1, "evaluation": metrics, "best": True}])
    text = "\n".join(panel(display))
    assert "zero_shot/task_5                –" in text
    assert "task_6" not in text
    assert "4 more in metrics.jsonl" in text


def test_messages_scroll_above_the_panel_which_stays_at_the_end(live):
    display = live()
    display.log(V3 | {"step": 619})
    display.message("saved [it]")
    display.tick(620)  # too soon to be drawn
    display.close()
    shown = display.view.console.file.getvalue()
    assert shown.index("saved [it]\n") < shown.index("620/5,200 steps") < shown.rindex("╰")
