"""`Processes`: the processes of one launch, and what they tell each other.

A federation under `accelerate launch` runs the same program in every process. What crosses between them is tensors and
packed trees; nothing is pickled. A process that fails says so to the others before it ends, so that each of them ends
with the error that came first and not with a lost connection.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState

from ..messages.serialization import pack, unpack
from .failure_store import NoticeBoard


T = TypeVar("T")

# One process may wait for another's clients for as long as these train; one that died is noticed at once.
PATIENCE = timedelta(days=30)
BUCKET_BYTES = 32 * 2**20
# So long the main process stays for the others, that they can read why it failed.
SECONDS_TO_READ = 5.0
# Gloo raises plain RuntimeErrors, and DistributedDataParallel some about its own.
LOST_CONNECTION = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|process group", re.IGNORECASE)


class PeerFailedError(RuntimeError):
    """Another process of the launch failed. The message holds its error."""


class LaunchFailedError(RuntimeError):
    """An earlier run of this launch failed, and its processes have left one another."""


class OutOfStepError(RuntimeError):
    """The processes of the launch met from different places of the program. The message says which is where."""


class Processes:
    """
    The processes of one launch, seen from one of them. Use [`processes`], which makes one for each program.

    Args:
        rank (`int`): Number of this process among all, from 0.
        world_size (`int`): How many there are.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # The first error of the launch, once there was one. Its processes have then left one another.
        self.failed: str | None = None
        self._group: Any = None
        self._place = ""
        if world_size > 1:
            # The store through which the processes met. A socket of our own would need another open port.
            self._board = NoticeBoard(dist.distributed_c10d._get_default_store(), rank, world_size)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files that there are one of."""
        return self.rank == 0

    @contextmanager
    def independent(self, as_main: bool = False) -> Iterator[None]:
        """
        Let accelerate and transformers take this process for the only one: models are not wrapped, data is not cut
        among processes, nothing waits for others.

        Args:
            as_main (`bool`, *optional*, defaults to `False`):
                Let it also take itself for the main process. Otherwise it keeps its number, so that what only the main
                process does (write files, log) is done once.
        """
        if self.world_size == 1:
            yield
            return
        alone: dict[str, Any] = {"num_processes": 1, "distributed_type": DistributedType.NO}
        if as_main:
            alone |= {"process_index": 0, "local_process_index": 0}
        # The states of accelerate share one dictionary each; they have no interface for this.
        shared = [PartialState._shared_state, AcceleratorState._shared_state]
        before = [{name: state[name] for name in alone if name in state} for state in shared]
        for state, values in zip(shared, before, strict=True):
            state.update({name: alone[name] for name in values})
        try:
            yield
        finally:
            for state, values in zip(shared, before, strict=True):
                state.update(values)

    def meet(self, patience: float) -> None:
        """
        Wait for all processes, the first time for a limited while. All must call it before they tell each other
        anything.

        Args:
            patience (`float`): Seconds.

        Raises:
            TimeoutError: If a process did not come. The message names it.
            PeerFailedError: If another process failed.
            LaunchFailedError: If an earlier run of this launch failed.
        """
        self.raise_if_failed()
        if self.world_size == 1 or self._group is not None:
            return
        self._board.say("came")
        self._board.watch()
        deadline = time.monotonic() + patience
        while missing := self._board.wait_for_others("came", seconds=0.5):
            self.look_for_failure()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{name_processes(missing).capitalize()} of {self.world_size} did not come within {patience:g} s "
                    "(`ddp_timeout` of the arguments) to where the others build their trainer: every process has to "
                    "build it, also those whose `is_world_process_zero()` is False. Its own output may hold an error."
                )
        # Small things travel between the hosts' memories, whatever the backend of the accelerators.
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        atexit.register(self._end)

    # ---- What they tell each other

    def gather(self, place: str, tree: Any) -> list[Any]:
        """
        What every process gave, in the order of their numbers. All must call it.

        Args:
            place (`str`): Where in the program this process is, as it stands in an error. The same in all of them.
            tree (`Any`): What [`~hf_federated.messages.serialization.pack`] takes.

        Raises:
            OutOfStepError: In all processes, if they came from different places.
            PeerFailedError: If another process failed or was killed.
            LaunchFailedError: If an earlier run of this launch failed.
        """
        if self.world_size == 1:
            return [tree]
        self.raise_if_failed()
        self._place = place
        blob = torch.frombuffer(bytearray(pack({"place": place, "tree": tree})), dtype=torch.uint8)
        with self._lost_connections():
            lengths = torch.zeros(self.world_size, dtype=torch.int64)
            lengths[self.rank] = blob.numel()
            dist.all_reduce(lengths, group=self._group)
            blobs = [torch.zeros(int(lengths.max()), dtype=torch.uint8) for _ in range(self.world_size)]
            padded = torch.zeros_like(blobs[0])
            padded[: blob.numel()] = blob
            dist.all_gather(blobs, padded, group=self._group)
        told = [
            unpack(received[:length].numpy().tobytes())
            for received, length in zip(blobs, lengths.tolist(), strict=True)
        ]
        differing = by_value([theirs["place"] for theirs in told])
        if len(differing) > 1:
            raise OutOfStepError(
                "The processes of this launch are in different places: "
                + "; ".join(f"{name_processes(ranks)} at {place!r}" for place, ranks in differing.items())
                + ". Each of them has to build, train, evaluate and save alike: `if trainer.is_world_process_zero()` "
                "may guard only what does none of this, and each has to catch an error that another one catches."
            )
        return [theirs["tree"] for theirs in told]

    def from_main(self, place: str, find: Callable[[], T]) -> T:
        """
        What the main process finds, for all of them: what would differ between processes is asked once. All must call
        it.

        Args:
            place (`str`): As in `gather`.
            find (`Callable`): Called in the main process alone. It returns what
                [`~hf_federated.messages.serialization.pack`] takes.

        Raises:
            OutOfStepError: In all processes, if they came from different places.
            PeerFailedError: If another process failed or was killed.
        """
        return self.gather(place, find() if self.is_main else None)[0]

    def wait(self, place: str) -> None:
        """
        Wait for all processes.

        Args:
            place (`str`): As in `gather`.

        Raises:
            OutOfStepError: In all processes, if they came from different places.
            PeerFailedError: If another process failed or was killed.
        """
        self.gather(place, None)

    def sum_(self, tensors: Iterable[torch.Tensor]) -> int:
        """
        Replace tensors by their sums over all processes, which must give the same shapes, dtypes and order. A `gather`
        just before makes sure that they are in the same place.

        Args:
            tensors (`Iterable[torch.Tensor]`): Contiguous; on the CPU or on this process's accelerator.

        Returns:
            `int`: Bytes that this process gave.

        Raises:
            PeerFailedError: If another process failed or was killed.
        """
        num_bytes = 0
        if self.world_size == 1:
            return num_bytes
        with self._lost_connections():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self._group_of(flat))
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])
                num_bytes += flat.nbytes
        return num_bytes

    def broadcast_(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """
        Replace tensors by those of one process. A `gather` just before makes sure that all are in the same place.

        Args:
            tensors (`Iterable[torch.Tensor]`): The same shapes, dtypes and order in every process; on the CPU or on
                this process's accelerator.
            source (`int`): Whose.

        Raises:
            PeerFailedError: If another process failed or was killed.
        """
        if self.world_size == 1:
            return
        with self._lost_connections(), torch.no_grad():
            for bucket in _buckets(tensors):
                # As bytes, since the libraries below do not know every dtype.
                flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in bucket])
                dist.broadcast(flat, src=source, group=self._group_of(flat))
                for tensor, part in zip(bucket, flat.split([tensor.nbytes for tensor in bucket]), strict=True):
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def _group_of(self, tensor: torch.Tensor) -> Any:
        return self._group if tensor.device.type == "cpu" else None

    # ---- Failures

    @contextmanager
    def shared_fate(self) -> Iterator[None]:
        """
        Whatever ends the body with an error ends it in all processes. After that the launch has failed: its processes
        have left one another, and only what one of them can do alone still works.

        Raises:
            PeerFailedError: If another process failed first. The message holds its error.
        """
        try:
            yield
        except BaseException as error:
            # Of nested bodies the inner one has told the others.
            if self.world_size == 1 or self.failed is not None:
                raise
            shown = self._fail(error)
            if shown is error:
                raise
            raise shown from error

    def _fail(self, error: BaseException) -> BaseException:
        """Tell the others of an error and leave them; the error to show instead of it, or itself."""
        shown = self.lost_peer(error) or error
        own = f"{type(shown).__name__}: {shown}"
        first = self._board.failure()
        if first is None:
            self._board.report(own)
        elif not isinstance(shown, PeerFailedError) and first["rank"] != self.rank and first["error"] != own:
            shown = PeerFailedError(_describe(first))
        self.failed = own if first is None else _describe(first)
        self._leave()
        self._board.say("knows")
        self._stay_for_others("knows", "ended")
        self._board.close()
        return shown

    def raise_if_failed(self) -> None:
        """
        Refuse to go on in a launch that has failed.

        Raises:
            LaunchFailedError: If so.
        """
        if self.failed is not None:
            raise LaunchFailedError(
                f"An earlier run of this launch failed, and its processes have left one another ({self.failed}). "
                "Start the launch again; `resume_from_checkpoint=True` goes on from the last checkpoint."
            )

    def look_for_failure(self) -> None:
        """
        Raise if another process has failed. Cheap enough for every step.

        Raises:
            PeerFailedError: If so.
        """
        if self.world_size > 1 and self._board.known_failure is not None:
            raise PeerFailedError(_describe(self._board.known_failure))

    def lost_peer(self, error: BaseException | None) -> PeerFailedError | None:
        """
        What lies behind an error of the communication libraries: another process went, and why if it said so.

        Args:
            error (`BaseException`, *optional*): Any.

        Returns:
            [`PeerFailedError`]: `None` if the error is of another kind.
        """
        if self.world_size == 1 or not isinstance(error, RuntimeError) or isinstance(error, PeerFailedError):
            return None
        if not isinstance(error, dist.DistError) and not LOST_CONNECTION.search(str(error)):
            return None
        return self._lost_connection(error)

    def _lost_connection(self, error: RuntimeError, where: str = "") -> PeerFailedError:
        failure = self._board.failure()
        if failure is not None:
            return PeerFailedError(_describe(failure))
        ended = [
            rank for rank in range(self.world_size) if rank not in (self.rank, *self._board.others_without("ended"))
        ]
        if ended:
            return PeerFailedError(
                f"{name_processes(ended).capitalize()} came to the end of its script{where}. Each process has to "
                "build, train, evaluate and save alike."
            )
        return PeerFailedError(
            f"A process of the launch ended without a word{where}; it may have been killed, run out of memory or come "
            f"to the end of its script: {error}"
        )

    @contextmanager
    def _lost_connections(self) -> Iterator[None]:
        """Say why a connection was lost."""
        try:
            yield
        except RuntimeError as error:
            where = f" while process {self.rank} waited for it at {self._place!r}"
            raise self._lost_connection(error, where) from error

    def _end(self) -> None:
        if self.failed is None:
            self._board.say("ended")
            self._stay_for_others("ended")
        self._board.close()
        self._leave()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _stay_for_others(self, *whats: str) -> None:
        # The board goes with the main process, where it is not kept by a launcher as torchrun.
        if self.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._board.wait_for_others(*whats, seconds=SECONDS_TO_READ)

    def _leave(self) -> None:
        """Close the connections of the group, so that nobody waits for this process."""
        if self._group is not None and dist.is_initialized():
            # The default group stays: new training arguments would wait for everybody to make another.
            dist.destroy_process_group(self._group)
        self._group = None  # Connections last as long as anything refers to them.


# Environment variables that hold the number of processes of a launch, as accelerate reads them.
WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_launch(num_processes: int) -> None:
    """
    Refuse a launch that was set up for several processes and runs as independent processes.

    `accelerate launch` with `distributed_type: MULTI_CPU` and without `mpirun` sets the address of a main process and
    no world size, so each machine would train the whole federation alone.

    Args:
        num_processes (`int`): Number of processes that accelerate found.

    Raises:
        ValueError: If the environment announces more processes.
    """
    if num_processes > 1:
        return
    announced = max(int(os.environ.get(name, 1)) for name in WORLD_SIZES)
    launched_by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if announced > 1:
        found = f"The launch announces {announced} processes"
    elif launched_by_accelerate and not any(name in os.environ for name in WORLD_SIZES):
        found = f"`accelerate launch` set up several processes around {os.environ['MASTER_ADDR']}"
    else:
        return
    raise ValueError(
        f"{found}, but accelerate found one, so each process would train the whole federation alone. Launch with "
        "`torchrun`, with `distributed_type: MULTI_GPU` (with `use_cpu: true` on machines without GPUs), or with "
        "`--mpirun_hostfile` for `distributed_type: MULTI_CPU`."
    )


@functools.cache
def processes() -> Processes:
    """The processes of this launch, after accelerate was set up."""
    state = PartialState()
    return Processes(state.process_index, state.num_processes)


@contextmanager
def shared_construction() -> Iterator[None]:
    """
    [`~Processes.shared_fate`] for the construction of a trainer, in whose course accelerate is set up.

    Raises:
        LaunchFailedError: If an earlier run of this launch failed.
        PeerFailedError: If another process failed first. The message holds its error.
    """
    # In a launch that has failed there is nothing initialised any more.
    if processes.cache_info().currsize:
        processes().raise_if_failed()
    try:
        yield
    except BaseException:
        if not dist.is_initialized():
            raise
        with processes().shared_fate():
            raise


def by_value(values: Sequence[str]) -> dict[str, list[int]]:
    """The values that processes gave in the order of their numbers, and who gave each."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def name_processes(ranks: Sequence[int]) -> str:
    """Processes as they stand in an error."""
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"


def _describe(failure: dict[str, Any]) -> str:
    return f"Process {failure['rank']} failed: {failure['error']}"


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device, up to a size."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        same = bucket and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not same or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
