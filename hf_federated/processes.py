"""`Processes`: the processes of one launch, and what they tell each other.

A federation under `accelerate launch` runs the same program in every process. What crosses between them is tensors and
packed trees; nothing is pickled. A process that fails says so to the others before it ends, so that each of them ends
with the error that came first and not with a lost connection.
"""

from __future__ import annotations

import atexit
import functools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState

from .messages import pack, unpack


# One process may wait for another's clients for as long as these train; one that died is noticed at once.
PATIENCE = timedelta(days=30)
BUCKET_BYTES = 32 * 2**20
FAILURE_KEY = "hf_federated/failure"
SECONDS_BETWEEN_LOOKS = 0.5


class PeerFailedError(RuntimeError):
    """Another process of the launch failed. The message holds its error."""


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
        self._group: Any = None
        self._store: Any = None
        self._looked_at = 0.0
        if world_size > 1:
            # Small things travel between the hosts' memories, whatever the backend of the accelerators.
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
            # The store through which the processes met. A socket of our own would need another open port.
            self._store = dist.distributed_c10d._get_default_store()
            atexit.register(_leave)

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

    # ---- What they tell each other

    def gather(self, place: str, tree: Any) -> list[Any]:
        """
        What every process gave, in the order of their numbers. All must call it.

        Args:
            place (`str`): Where in the program this process is, as it stands in an error. The same in all of them.
            tree (`Any`): What [`~hf_federated.messages.pack`] takes.

        Raises:
            OutOfStepError: In all processes, if they came from different places.
            PeerFailedError: If another process failed or was killed.
        """
        if self.world_size == 1:
            return [tree]
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
        Whatever ends the body with an error ends it in all processes.

        Raises:
            PeerFailedError: If another process failed first. The message holds its error.
        """
        if self.world_size == 1:
            yield
            return
        try:
            yield
        except BaseException as error:
            own = f"{type(error).__name__}: {error}"
            first = self._failure() if not isinstance(error, PeerFailedError) else None
            if first is None:
                self._report(own)
            # Without the connections nobody waits for this process.
            _leave()
            if first is not None and first["rank"] != self.rank and first["error"] != own:
                raise PeerFailedError(_describe(first)) from error
            raise

    def look_for_failure(self) -> None:
        """
        Raise if another process has failed. Cheap enough for every step; it looks at most twice a second.

        Raises:
            PeerFailedError: If so.
        """
        if self.world_size == 1 or time.monotonic() - self._looked_at < SECONDS_BETWEEN_LOOKS:
            return
        self._looked_at = time.monotonic()
        failure = self._failure()
        if failure is not None:
            raise PeerFailedError(_describe(failure))

    @contextmanager
    def _lost_connections(self) -> Iterator[None]:
        """Say why a connection was lost."""
        try:
            yield
        except RuntimeError as error:
            failure = self._failure()
            lost = "A process of the launch ended without a word; it may have been killed or run out of memory"
            raise PeerFailedError(f"{lost}: {error}" if failure is None else _describe(failure)) from error

    def _report(self, error: str) -> None:
        try:
            # Only the first is kept.
            self._store.compare_set(FAILURE_KEY, "", json.dumps({"rank": self.rank, "error": error}))
        except RuntimeError:
            pass  # The store went with its process; the others notice that.

    def _failure(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._store.get(FAILURE_KEY)) if self._store.check([FAILURE_KEY]) else None
        except RuntimeError:
            return None


@functools.cache
def processes() -> Processes:
    """The processes of this launch. The first call is made by all of them, after accelerate was set up."""
    state = PartialState()
    return Processes(state.process_index, state.num_processes)


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


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


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
