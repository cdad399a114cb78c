"""Runs a function in several real processes that communicate over gloo, and returns their results."""

import os
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Processes are forked from one that has imported everything: importing takes longer than most tests.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["fastclip.training.trainer", "pytest", "hypothesis"])


def run_ranks(function, world_size, *args, timeout=90):
    """[function(rank, world_size, *args) for each rank]; a rank's exception is raised here.

    `function` must be at the top level of a module. No process outlives the call, whatever happens.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_rank, args=(function, rank, world_size, folder, args), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + timeout
            while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
                if any(p.exitcode not in (None, 0) for p in processes):
                    time.sleep(1)  # let the others report what they saw
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        if errors:
            raise RuntimeError("\n".join(errors))
        results = [Path(folder) / f"{rank}.pt" for rank in range(world_size)]
        missing = [path.stem for path in results if not path.exists()]
        if missing:
            raise TimeoutError(f"ranks {missing} did not finish within {timeout} s")
        return [torch.load(path, weights_only=False) for path in results]


def _rank(function, rank, world_size, folder, args):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        result = function(rank, world_size, *args)
        torch.save(result, Path(folder) / f"{rank}.part")
        (Path(folder) / f"{rank}.part").rename(Path(folder) / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
