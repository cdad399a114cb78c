"""Blends of a run's first and last weights: exact at both ends, refused without a start."""

import json
import shutil

import open_clip
import pytest
import torch

from fastclip.cli import main
from fastclip.errors import OptionError, PathError
from fastclip.lora import merged_state
from fastclip.model import build_model
from fastclip.run.blend import Blends
from fastclip.run.load import load_exported, load_model
from fastclip.training.export import export
from tests.training.runs import MODEL, Lab

OPTIONS = {"epochs": 1, "evaluate__pairs": "null", "checkpoint__every_steps": "null"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("blend"))


@pytest.fixture(scope="module")
def start(lab):
    return export(build_model(str(lab.model), device="cpu", seed=7), lab.folder / "start", tau=0.07)


@pytest.fixture(scope="module", params=[None, "{rank: 2}"], ids=["whole", "lora"])
def run(request, lab, start):
    """A fine-tuned model, with and without LoRA."""
    lora = {} if request.param is None else {"model__lora": request.param}
    out = lab.folder / f"run-{len(lora)}"
    lab.start(out, model__pretrained=start, **OPTIONS, **lora).finish()
    return out


@pytest.fixture(autouse=True)
def cache(lab, monkeypatch):
    monkeypatch.setenv("FASTCLIP_CACHE", lab.environment["FASTCLIP_CACHE"])


def weights(towers):
    return {
        name: tensor for name, tensor in merged_state(towers.clip).items() if not name.startswith("logit_")
    }


@pytest.mark.slow
def test_the_ends_are_the_first_and_last_weights_and_between_them_is_a_straight_line(run, start):
    first, (last, tau) = weights(load_exported(start)), load_model(run)
    end, blends = weights(last), Blends(run)
    assert blends.tau == tau
    for share in (0.0, 0.25, 1.0):
        for name, tensor in weights(blends.blend(share)).items():
            torch.testing.assert_close(tensor, torch.lerp(first[name], end[name], share), rtol=0, atol=0)
    assert any(not torch.equal(first[name], end[name]) for name in end)


@pytest.mark.slow
def test_an_exported_blend_loads_in_open_clip_with_its_features(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out"), "--blend", "0.5"]) == 0
    ours = Blends(run).blend(0.5)
    plain = open_clip.create_model(f"local-dir:{tmp_path / 'out'}").eval()
    images, tokens = torch.randn(3, 3, 32, 32), ours.tokenizer()(["a red thing", "a blue one"])
    with torch.no_grad():
        torch.testing.assert_close(
            plain.encode_image(images, normalize=True), ours.clip.encode_image(images, normalize=True)
        )
        torch.testing.assert_close(plain.encode_text(tokens, normalize=True), ours.encode_text(tokens))
    assert "0.5 of the way" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_eval_prints_and_draws_the_new_tasks_against_those_of_before(run, lab, tmp_path, capsys):
    before = tmp_path / "before.tar"
    shutil.copy(lab.held_out, before)
    command = ["eval", str(run), "--tasks", str(lab.train), "--tasks_before", str(before), "--workers", "0"]
    assert main([*command, "--blend", "1,0,0.5", "--out", str(tmp_path / "out"), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["share"] for point in points] == [0, 0.5, 1]
    for point in points:
        assert point["scores"] == {"pairs.tar": point["new"], "before.tar": point["before"]}
    assert (tmp_path / "out" / "blend.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "blend.json").read_text()) == {"points": points}
    kept = (tmp_path / "out" / "blends.jsonl").read_text()
    assert main([*command, "--blend", "0,0.5", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "blends.jsonl").read_text() == kept  # known ones are not scored again
    assert "0.5" in capsys.readouterr().out


@pytest.mark.slow
def test_a_start_that_is_gone_can_be_passed_and_another_is_refused(run, start, lab, tmp_path):
    kept = start.rename(start.with_name("moved"))
    try:
        with pytest.raises(PathError) as caught:
            Blends(run)
        assert "--start" in str(caught.value)
        assert Blends(run, start=kept).blend(0.5) is not None
        other = export(build_model(str(lab.model), device="cpu", seed=8), tmp_path / "other", tau=0.07)
        with pytest.raises(PathError) as caught:
            Blends(run, start=other)
        assert caught.value.path == str(other)
    finally:
        kept.rename(start)


def test_only_a_fine_tuned_run_has_blends(lab, tmp_path, capsys):
    lab.start(tmp_path / "new", **OPTIONS).finish()
    with pytest.raises(PathError) as caught:
        Blends(tmp_path / "new")
    assert caught.value.path == str(tmp_path / "new")
    with pytest.raises(PathError):
        Blends(tmp_path / "new" / "model")
    larger = MODEL | {"embed_dim": 24}
    (tmp_path / "larger-run.json").write_text(json.dumps(larger))
    other = build_model(str(tmp_path / "larger-run.json"), device="cpu")
    with pytest.raises(PathError) as caught:
        Blends(tmp_path / "new", start=export(other, tmp_path / "larger", tau=0.07))
    assert "(16, 24)" in str(caught.value)


@pytest.mark.slow
def test_shares_outside_0_to_1_are_refused(run, tmp_path, capsys):
    with pytest.raises(OptionError):
        Blends(run).blend(1.5)
    assert main(["eval", str(run), "--tasks", str(tmp_path), "--blend", "0,2"]) == 1
    assert main(["export", str(run), str(tmp_path / "out"), "--start", "x"]) == 1
    assert "blend" in capsys.readouterr().err
