"""How long a step computes, and the settings of the paper."""

import json
from dataclasses import asdict

import pytest

from fastclip.config.parse import parse
from fastclip.tools.profiling.job import SETTINGS, Computation, from_paper, from_profile, stated
from fastclip.tools.profiling.network import GPUS_PER_NODE
from tests.tools.profiling.profiles import profile, times, worker


@pytest.fixture
def file(tmp_path):
    """v3 on one worker and on two, and v1 on one."""
    steps = {size: [times(100.0 * size, computation=70.0 * size, pure=10.0)] for size in (1, 2)}
    profiles = [
        profile("fastclip-v3", [worker(0, steps[2]), worker(1, steps[2])], batch=64),
        profile("fastclip-v3", [worker(0, steps[1])], batch=32),
        profile("fastclip-v1", [worker(0, [times(50.0, computation=40.0)])], batch=32),
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"profiles": [asdict(p) for p in profiles]}))
    return path


def test_a_stated_time_is_all_computation():
    assert stated(250, 128)[:3] == (250, 0.0, 128)


@pytest.mark.parametrize("ms", [0, -3.0, float("inf"), float("nan")])
def test_an_impossible_time_is_refused(ms):
    with pytest.raises(
        ValueError, match=r"--compute-ms .* must be a positive number of milliseconds; try 250"
    ):
        stated(ms, 128)


def test_computation_is_in_proportion_to_the_batch_and_others_stay():
    assert Computation(200.0, 30.0, 128, "").at(32) == (50.0, 30.0, 32, "")


def test_a_profile_tells_computation_from_others_on_the_fewest_workers(file):
    found = from_profile(file, "fastclip-v3")
    assert found[:3] == (70.0, 20.0, 32)
    assert "fastclip-v3 at 32 pairs a worker" in found.source
    assert from_profile(file.parent, "fastclip-v1").computation == 40.0


def test_an_algorithm_that_was_not_profiled_takes_the_first(file):
    assert from_profile(file, "openclip").computation == 70.0


def test_a_missing_profile_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*profile.json. Make one with `fastclip profile`"):
        from_profile(tmp_path, "openclip")


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"profiles": []}', '{"profiles": [{"batch": 1}]}'])
def test_another_file_is_told(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is not what `fastclip profile` writes .* Give its profile.json"):
        from_profile(path, "openclip")


def test_the_papers_recipes_have_their_one_node_rows():
    found = from_paper("cc3m-medium", "RN50", "slingshot-2", "openclip")
    assert found[:3] == (157.47, 50.52, 128)
    assert "Table time_cc3m_bigred, one node of slingshot-2" in found.source
    assert from_paper("cc3m-medium", "RN50", "ib", "fastclip-v1")[:2] == (771.80, 69.06)  # as v3's


def test_what_the_paper_did_not_time_has_no_row():
    assert from_paper("emoji", "vit-emoji", "ib", "openclip") is None
    assert from_paper("cc3m-medium", "ViT-B-32", "ib", "openclip") is None
    assert from_paper("cc12m-large", "ViT-B-32", "10gbe", "openclip") is None  # whose GPUs would they be?
    assert from_paper("laion-xlarge", "ViT-B-16", "ib", "openclip") is None


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_those_of_the_recipes(name):
    config, setting = parse(["--config", name]), SETTINGS[name]
    assert config.model.name == setting.model
    assert config.batch.size == 2 * GPUS_PER_NODE * setting.local_batch  # the paper trained on two nodes
