"""The processes of a launch: refuse processes that do not communicate, and let a process work as the only one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.state import DistributedType

from .._compat import process_states


# Environment variables from which accelerate reads the number of processes of a launch.
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_launch(num_processes: int) -> None:
    """
    Raise an error if a launch of several processes runs as independent processes.

    `accelerate launch` with `distributed_type: MULTI_CPU` and without `mpirun` sets the address of a main process but
    no world size. Each machine would then train the whole federation alone.

    Args:
        num_processes (`int`): Number of processes that accelerate found.

    Raises:
        ValueError: If accelerate found one process and the environment describes several.
    """
    if num_processes > 1:
        return
    announced = max(int(os.environ.get(name, 1)) for name in WORLD_SIZE_VARIABLES)
    launched_by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if announced > 1:
        found = f"The environment of the launch sets {announced} processes"
    elif launched_by_accelerate and not any(name in os.environ for name in WORLD_SIZE_VARIABLES):
        found = f"`accelerate launch` set up several processes with the main process at {os.environ['MASTER_ADDR']}"
    else:
        return
    raise ValueError(
        f"{found}, but accelerate found one process, so each process would train the whole federation alone. Launch "
        "with `torchrun`, with `distributed_type: MULTI_GPU` (with `use_cpu: true` on machines without GPUs), or with "
        "`--mpirun_hostfile` for `distributed_type: MULTI_CPU`."
    )


@contextmanager
def single_process(as_main: bool) -> Iterator[None]:
    """
    Make accelerate and transformers treat this process as the only process of the launch.

    Args:
        as_main (`bool`): Whether this process also becomes the main process.
    """
    alone: dict[str, Any] = {"num_processes": 1, "distributed_type": DistributedType.NO}
    if as_main:
        alone |= {"process_index": 0, "local_process_index": 0}
    # All instances of a state class of accelerate share one dictionary. accelerate has no public method to set it.
    shared = process_states()
    before = [{name: state[name] for name in alone if name in state} for state in shared]
    for state, values in zip(shared, before, strict=True):
        state.update({name: alone[name] for name in values})
    try:
        yield
    finally:
        for state, values in zip(shared, before, strict=True):
            state.update(values)
