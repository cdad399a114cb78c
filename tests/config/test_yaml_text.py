"""YAML of others: read as PyYAML reads it, or refused at once."""

import pytest
import yaml

from fastclip.config.parse import RECIPES, parse
from fastclip.config.yaml_text import read_yaml
from fastclip.errors import OptionError, PathError
from fastclip.tools.study.definition import load_study

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 10)
)
HOSTILE = {
    "laughs": LAUGHS,
    "merges": MERGES,
    "itself": "a: &a [*a]",
    "deep-flow": "a: " + "[" * 50_000,
    "deep-block": "- " * 5_000 + "x",
    "deep-aliases": "a0: &a0 []\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 2_000)),
    "twice": "epochs: 1\nseed: 2\nepochs: 3",
    "digits": "seed: " + "9" * 5_000,
    "large": "seed: 99999999999999999999",
    "hex": "seed: 0x" + "f" * 9_000,
    "date": "out: 2001-99-99",
    "int-tag": "seed: !!int x",
    "bool-tag": "resume: !!bool x",
    "time-tag": "out: !!timestamp x",
    "code": "out: !!python/object/apply:os.getcwd []",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_is_refused_at_once(text, tmp_path):
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)
    file = tmp_path / "hostile.yaml"
    file.write_text(text)
    with pytest.raises(PathError) as caught:
        parse(["--config", str(file)])
    assert caught.value.path == str(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(PathError) as caught:
        load_study(file)
    assert caught.value.path == str(file)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_read_as_pyyaml_reads_them(path):
    text = path.read_text()
    assert read_yaml(text) == yaml.safe_load(text)


def test_aliases_merges_and_long_lists_are_read():
    text = "a: &a {k: 1, l: [1, 2]}\nb: {<<: *a, k: 2}\nc: [*a, *a]\n"
    assert read_yaml(text) == yaml.safe_load(text)
    many = [f"shards/{i:06d}.tar" for i in range(3_000)]
    assert read_yaml(f"data: {many}") == {"data": many}


@pytest.mark.parametrize("value", ["[" * 50_000, "{a: &a [*a]}"])
def test_hostile_values_on_the_command_line_are_refused(value):
    with pytest.raises(OptionError) as caught:
        parse(["--config", "emoji", "--seed", value])
    assert caught.value.option == "seed"


def test_a_value_that_looks_like_a_date_stays_text():
    assert parse(["--config", "emoji", "--out", "2001-99-99"]).out == "2001-99-99"
