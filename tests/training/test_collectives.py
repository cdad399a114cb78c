"""All ranks call the same collectives in the same order: torch compares them before each one."""

from functools import partial

import pytest
import torch.distributed as dist

from fastclip.training import build
from tests.training.runs import ALGORITHM, Lab, Run


def _compare_collectives(rank):
    """What TORCH_DISTRIBUTED_DEBUG=DETAIL does, except for DDP: torch's own crashes over such a group."""
    join = dist.init_process_group

    def join_compared(*place, **options):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        join(*place, **options)
        dist.set_debug_level(dist.DebugLevel.OFF)
        build.DistributedDataParallel = partial(build.DistributedDataParallel, process_group=dist.new_group())
        print("compared", flush=True)

    dist.init_process_group = join_compared


@pytest.mark.slow
def test_ranks_call_collectives_in_one_order_from_start_to_export(tmp_path):
    lab = Lab(tmp_path / "lab", epochs=2)
    options = lab.options(tmp_path / "run", ALGORITHM[2], evaluate__every_epochs=1)
    run = Run(options, 2, lab.environment, prepare=_compare_collectives).finish()
    assert run.output().count("compared") == 2
    assert (tmp_path / "run" / "model").is_dir()
