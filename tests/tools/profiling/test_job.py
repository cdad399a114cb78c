"""The computation time of a step, and the paper's settings."""

import json
from dataclasses import asdict

import pytest

from fastclip.config.parse import parse
from fastclip.errors import OptionError
from fastclip.tools.profiling.job import SETTINGS, Computation, from_paper, from_profile, stated
from fastclip.tools.profiling.network import GPUS_PER_NODE
from tests.tools.profiling.profiles import profile, rank_profile, times


@pytest.fixture
def file(tmp_path):
    """A profile.json: v3 with one rank and two, v1 with one."""
    steps = {ranks: [times(100.0 * ranks, computation=70.0 * ranks, pure=10.0)] for ranks in (1, 2)}
    profiles = [
        profile("fastclip-v3", [rank_profile(0, steps[2]), rank_profile(1, steps[2])], batch=64),
        profile("fastclip-v3", [rank_profile(0, steps[1])], batch=32),
        profile("fastclip-v1", [rank_profile(0, [times(50.0, computation=40.0)])], batch=32),
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"profiles": [asdict(p) for p in profiles]}))
    return path


def test_a_given_time_is_all_computation():
    assert stated(250, 128)[:3] == (250, 0.0, 128)


@pytest.mark.parametrize("ms", [0, -3.0, float("inf"), float("nan")])
def test_a_given_time_must_be_positive_and_finite(ms):
    with pytest.raises(OptionError) as caught:
        stated(ms, 128)
    assert caught.value.option == "compute_ms"
    assert caught.value.value is ms


def test_computation_scales_with_the_batch_and_others_do_not():
    assert Computation(200.0, 30.0, 128, "").at(32) == (50.0, 30.0, 32, "")


def test_a_profile_separates_computation_from_others_with_the_fewest_ranks(file):
    measured = from_profile(file, "fastclip-v3")
    assert measured[:3] == (70.0, 20.0, 32)
    assert all(fact in measured.source for fact in (str(file), "fastclip-v3", "32"))
    assert from_profile(file.parent, "fastclip-v1").computation == 40.0


def test_an_algorithm_that_was_not_profiled_takes_the_times_of_the_first(file):
    assert from_profile(file, "openclip").computation == 70.0


def test_a_missing_profile_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(OptionError) as caught:
        from_profile(tmp_path, "openclip")
    assert (caught.value.option, caught.value.value) == ("profile", tmp_path)
    assert "profile.json" in caught.value.rule


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"profiles": []}', '{"profiles": [{"batch": 1}]}'])
def test_a_file_that_is_not_a_profile_is_an_error(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        from_profile(path, "openclip")
    assert (caught.value.option, caught.value.value) == ("profile", path)


def test_the_papers_recipes_have_its_times_on_one_node():
    measured = from_paper("cc3m-medium", "RN50", "slingshot-2", "openclip")
    assert measured[:3] == (157.47, 50.52, 128)
    assert all(fact in measured.source for fact in ("time_cc3m_bigred", "slingshot-2", "128"))
    assert from_paper("cc3m-medium", "RN50", "ib", "fastclip-v1")[:2] == (771.80, 69.06)  # as v3's


def test_jobs_that_the_paper_did_not_time_have_no_computation():
    assert from_paper("emoji", "vit-emoji", "ib", "openclip") is None
    assert from_paper("cc3m-medium", "ViT-B-32", "ib", "openclip") is None
    assert from_paper("cc12m-large", "ViT-B-32", "10gbe", "openclip") is None  # with unknown GPUs
    assert from_paper("laion-xlarge", "ViT-B-16", "ib", "openclip") is None


@pytest.mark.parametrize("name", SETTINGS)
def test_the_papers_settings_agree_with_the_recipes(name):
    config, setting = parse(["--config", name]), SETTINGS[name]
    assert config.model.name == setting.model
    assert config.batch.size == 2 * GPUS_PER_NODE * setting.local_batch  # the paper trained on two nodes
