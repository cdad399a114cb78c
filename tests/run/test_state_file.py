"""state.json: every flipped bit is found; files of earlier versions are read as before."""

import json
import pickle

import pytest
from xxhash import xxh3_128_hexdigest

from fastclip.run.state_file import (
    DamagedCheckpoint,
    amend_state,
    check_digest,
    read_metadata,
    read_state,
    write_state,
)

FACTS = {"step": 20, "elapsed": 1.5e-05, "config": {"name": "τ", "seed": 3}, "best": {}}


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint with one file."""
    folder = tmp_path / "step-00000020"
    folder.mkdir()
    (folder / "rank-00000.safetensors").write_bytes(b"tensors")
    write_state(
        folder,
        FACTS,
        {"rank-00000.safetensors": 7},
        {"rank-00000.safetensors": xxh3_128_hexdigest(b"tensors")},
    )
    return folder


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_what_was_written_is_read(checkpoint):
    state = read_state(checkpoint)
    assert state.metadata == read_metadata(checkpoint) == FACTS
    assert state.sizes == {"rank-00000.safetensors": 7}
    check_digest(checkpoint, "rank-00000.safetensors", state)
    plain = json.loads((checkpoint / "state.json").read_text())  # as earlier versions read it
    assert (plain["facts"], plain["files"]) == (FACTS, state.sizes)


def test_values_can_be_changed_afterwards_and_the_files_stay_as_they_were(checkpoint):
    assert amend_state(checkpoint, {"best": {"step": 20}, "new": 1})
    state = read_state(checkpoint)
    assert state.metadata == {**FACTS, "best": {"step": 20}, "new": 1}
    check_digest(checkpoint, "rank-00000.safetensors", state)
    assert sorted(path.name for path in checkpoint.iterdir()) == ["rank-00000.safetensors", "state.json"]


def test_every_flipped_bit_is_refused_with_the_file(checkpoint):
    """Also those that change no value, such as 1.5e-05 to 1.5E-05."""
    file = checkpoint / "state.json"
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        file.write_bytes(flipped(content, bit))
        with pytest.raises(DamagedCheckpoint) as caught:
            read_state(checkpoint)
        assert caught.value.path == str(file)


def test_a_state_of_an_earlier_version_is_read_and_its_step_checked(checkpoint):
    file = checkpoint / "state.json"
    file.write_text(json.dumps({"facts": FACTS, "files": {"rank-00000.safetensors": 7}}))
    state = read_state(checkpoint)
    assert (state.metadata, state.digests) == (FACTS, {})
    check_digest(checkpoint, "rank-00000.safetensors", state)
    file.write_text(file.read_text().replace('"step": 20', '"step": 28'))
    (checkpoint.parent / "last").symlink_to(checkpoint.name)
    for path in (checkpoint, checkpoint.parent / "last"):
        with pytest.raises(DamagedCheckpoint) as caught:
            read_metadata(path)
        assert caught.value.path == str(path / "state.json")
        assert all(step in caught.value.reason for step in ("28", "step-00000020"))


def test_a_key_that_is_missing_is_damage_and_not_a_key_error(checkpoint):
    metadata = read_metadata(checkpoint)
    with pytest.raises(DamagedCheckpoint) as caught:
        metadata["fingerprint"]
    assert caught.value.path == str(checkpoint / "state.json")
    assert "fingerprint" in caught.value.reason
    assert metadata.get("fingerprint") is None


def test_damage_keeps_its_fields_from_one_rank_to_another():
    error = pickle.loads(pickle.dumps(DamagedCheckpoint("a/b", "it is short")))
    assert (error.path, error.reason) == ("a/b", "it is short")
    assert "--resume previous" in error.problem
