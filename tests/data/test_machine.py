"""Ranks divide what they share: cores of one set, and the /dev/shm of one container."""

from fastclip.data import machine
from fastclip.data.machine import Share, _Resources
from fastclip.distributed.world import World
from fastclip.files import cores

HERE = _Resources("a", (0, 1, 2, 3, 4, 5, 6, 7), 8, 25, 8_000)


def test_one_rank_has_its_machine():
    share = Share.of(World.alone())
    assert share.cores == cores()
    assert share.shared_memory is None or share.shared_memory > 0


def test_ranks_without_cores_of_their_own_divide_them():
    other = HERE._replace(machine="b")
    assert HERE.divided([HERE, HERE, HERE, HERE, other]) == Share(2, 2_000)
    assert HERE.divided([HERE] * 16) == Share(1, 500)


def test_cores_that_a_launcher_assigned_to_a_rank_are_its_own():
    own = [HERE._replace(allowed=(2 * i, 2 * i + 1), cores=2) for i in range(4)]
    assert own[1].divided(own) == Share(2, 2_000)


def test_containers_of_a_machine_divide_its_cores_and_have_their_own_shared_memory():
    other = HERE._replace(mount=26, free=64)
    assert HERE.divided([HERE, HERE, other, other]) == Share(2, 4_000)
    assert other.divided([HERE, HERE, other, other]) == Share(2, 32)


def test_a_system_without_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    assert Share.of(World.alone()) == Share(cores(), None)
