"""`ProcessGroup`: communication and shared failure of the processes of one launch.

A federation under `accelerate launch` runs the same program in every process. The processes exchange tensors and
serialized trees; nothing is pickled. A process that fails reports its error to the other processes before it ends.
Each process then ends with the first error of the launch instead of a lost connection.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.state import PartialState

from .._compat import default_store
from ..messages.serialization import UNLIMITED_TENSORS, pack, unpack
from .buckets import buckets
from .failure_store import FailureStore, describe_failure, is_lost_connection
from .launch import single_process
from .ranks import check_same_point, format_ranks


T = TypeVar("T")

# A process waits as long as the clients of another process train. The end of a process closes its connections, so the
# other processes do not wait for the timeout.
COLLECTIVE_TIMEOUT = timedelta(days=30)
# The main process waits this long before it ends, so that the other processes can read its error.
SHUTDOWN_WAIT_SECONDS = 5.0


class PeerFailedError(RuntimeError):
    """Another process of the launch failed. The message contains the error of that process."""


class LaunchFailedError(RuntimeError):
    """An earlier run of this launch failed, and its processes are disconnected."""


class ProcessGroup:
    """
    Processes of one launch. Use [`process_group`], which creates one instance per program.

    Every process has its own instance, with its own rank.

    Args:
        rank (`int`): Rank of this process, from 0.
        world_size (`int`): Number of processes.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # The first error of the launch, or `None`. After an error, the process group is closed.
        self.failed: str | None = None
        self._group: Any = None
        self._label = ""
        if world_size > 1:
            # The key-value store of `torch.distributed`. A separate store would need another open port.
            self._store = FailureStore(default_store(), rank, world_size)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files that the launch writes once."""
        return self.rank == 0

    def independent(self, as_main: bool = False) -> AbstractContextManager[None]:
        """
        Make accelerate and transformers treat this process as the only process of the launch.

        Inside the context, models are not wrapped, data is not split across processes, and no operation waits for
        another process.

        Args:
            as_main (`bool`, *optional*, defaults to `False`):
                Whether this process also becomes the main process. By default the process keeps its rank, so that only
                the main process of the launch writes files and logs.
        """
        return nullcontext() if self.world_size == 1 else single_process(as_main)

    def initialize(self, timeout: float) -> None:
        """
        Create the process group once all processes have called this method.

        Every process must call this method before it communicates with other processes. Later calls return at once.

        Args:
            timeout (`float`): Longest time to wait for the other processes, in seconds.

        Raises:
            TimeoutError: If a process did not call this method in time. The message lists its rank.
            PeerFailedError: If another process failed.
        """
        if self.world_size == 1 or self._group is not None:
            return
        self._store.post("joined")
        self._store.start_watching()
        deadline = time.monotonic() + timeout
        while missing := self._store.wait_for_peers("joined", seconds=0.5):
            self.raise_if_peer_failed()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{format_ranks(missing).capitalize()} of {self.world_size} did not build the trainer within "
                    f"{timeout:g} s (`ddp_timeout` of the training arguments). Build the trainer in every process, "
                    "also where `is_world_process_zero()` is False, and look for an error in the output of the "
                    "missing process."
                )
        # CPU tensors and serialized trees use gloo with every backend of the accelerators.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        atexit.register(self._finish)

    # ---- Communication

    def gather(self, label: str, tree: Any) -> list[Any]:
        """
        Collect one tree from every process, on all processes. Every process must call this method.

        Args:
            label (`str`): Point of the program, for error messages. It must be the same in all processes.
            tree (`Any`): Tree of this process, of the types that [`~hf_federated.messages.serialization.pack`]
                supports.

        Returns:
            `list[Any]`: Trees of all processes, in the order of their ranks.

        Raises:
            OutOfStepError: In all processes, if their labels differ.
            PeerFailedError: If another process failed or was killed.
            LaunchFailedError: If an earlier run of this launch failed.
        """
        if self.world_size == 1:
            return [tree]
        self.raise_if_failed()
        self._label = label
        blob = torch.frombuffer(bytearray(pack({"label": label, "tree": tree})), dtype=torch.uint8)
        with self._explain_lost_connection():
            lengths = torch.zeros(self.world_size, dtype=torch.int64)
            lengths[self.rank] = blob.numel()
            dist.all_reduce(lengths, group=self._group)
            blobs = [torch.zeros(int(lengths.max()), dtype=torch.uint8) for _ in range(self.world_size)]
            padded = torch.zeros_like(blobs[0])
            padded[: blob.numel()] = blob
            dist.all_gather(blobs, padded, group=self._group)
        messages = [
            unpack(received[:length].numpy().tobytes(), UNLIMITED_TENSORS)
            for received, length in zip(blobs, lengths.tolist(), strict=True)
        ]
        check_same_point([message["label"] for message in messages])
        return [message["tree"] for message in messages]

    def run_on_main(self, label: str, function: Callable[[], T]) -> T:
        """
        Run `function` on the main process and return its result on all processes. Every process must call this method.

        Use this method for values that could differ between processes.

        Args:
            label (`str`): Point of the program, as in `gather`.
            function (`Callable`): Function without arguments, called on the main process only. It returns a tree of
                the types that [`~hf_federated.messages.serialization.pack`] supports.

        Raises:
            OutOfStepError: In all processes, if their labels differ.
            PeerFailedError: If another process failed or was killed.
        """
        return self.gather(label, function() if self.is_main else None)[0]

    def wait(self, label: str) -> None:
        """
        Wait until all processes have called this method.

        Args:
            label (`str`): Point of the program, as in `gather`.

        Raises:
            OutOfStepError: In all processes, if their labels differ.
            PeerFailedError: If another process failed or was killed.
        """
        self.gather(label, None)

    def sum_(self, tensors: Iterable[torch.Tensor]) -> int:
        """
        Replace tensors in place by their sums over all processes.

        Every process must pass tensors of the same shapes and dtypes in the same order. Call `gather` just before, so
        that all processes are at the same point of the program.

        Args:
            tensors (`Iterable[torch.Tensor]`): Contiguous tensors, on the CPU or on the accelerator of this process.

        Returns:
            `int`: Number of bytes that this process contributed.

        Raises:
            PeerFailedError: If another process failed or was killed.
        """
        num_bytes = 0
        if self.world_size == 1:
            return num_bytes
        with self._explain_lost_connection():
            for bucket in buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self._group_of(flat))
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])
                num_bytes += flat.nbytes
        return num_bytes

    def broadcast_(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """
        Replace tensors in place by the tensors of one process.

        Call `gather` just before, so that all processes are at the same point of the program.

        Args:
            tensors (`Iterable[torch.Tensor]`): Tensors on the CPU or on the accelerator of this process, of the same
                shapes and dtypes and in the same order in every process.
            source (`int`): Rank of the process whose tensors are copied.

        Raises:
            PeerFailedError: If another process failed or was killed.
        """
        if self.world_size == 1:
            return
        with self._explain_lost_connection(), torch.no_grad():
            for bucket in buckets(tensors):
                # Tensors are sent as bytes, because the backends do not support every dtype.
                flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in bucket])
                dist.broadcast(flat, src=source, group=self._group_of(flat))
                for tensor, part in zip(bucket, flat.split([tensor.nbytes for tensor in bucket]), strict=True):
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def _group_of(self, tensor: torch.Tensor) -> Any:
        return self._group if tensor.device.type == "cpu" else None

    # ---- Failures

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """
        Stop all processes of the launch if one of them raises an error in the context.

        After an error the launch has failed: its process group is closed, and only operations that need no other
        process still work.

        Raises:
            PeerFailedError: If another process failed first. The message contains the error of that process.
        """
        try:
            yield
        except BaseException as error:
            # In nested contexts, the inner context has already reported the error.
            if self.world_size == 1 or self.failed is not None:
                raise
            shown = self._fail(error)
            if shown is error:
                raise
            raise shown from error

    def _fail(self, error: BaseException) -> BaseException:
        """
        Report an error to the other processes and close the process group.

        Returns:
            `BaseException`: The error to raise: `error`, or the failure of another process that caused it.
        """
        shown = self.to_peer_failed_error(error) or error
        own = f"{type(shown).__name__}: {shown}"
        first = self._store.get_failure()
        if first is None:
            self._store.report_failure(own)
        elif not isinstance(shown, PeerFailedError) and first["rank"] != self.rank and first["error"] != own:
            shown = PeerFailedError(describe_failure(first))
        self.failed = own if first is None else describe_failure(first)
        self._close_group()
        self._store.post("acknowledged")
        self._wait_for_readers("acknowledged", "finished")
        self._store.close()
        return shown

    def raise_if_failed(self) -> None:
        """
        Raise an error if an earlier run of this launch failed.

        Raises:
            LaunchFailedError: If an earlier run failed.
        """
        if self.failed is not None:
            raise LaunchFailedError(
                f"An earlier run of this launch failed, and its processes are disconnected ({self.failed}). Start the "
                "launch again; `resume_from_checkpoint=True` resumes from the last checkpoint."
            )

    def raise_if_peer_failed(self) -> None:
        """
        Raise an error if another process has failed. The check is cheap enough for every step.

        Raises:
            PeerFailedError: If another process has failed. The message contains the error of that process.
        """
        if self.world_size > 1 and self._store.known_failure is not None:
            raise PeerFailedError(describe_failure(self._store.known_failure))

    def to_peer_failed_error(self, error: BaseException | None) -> PeerFailedError | None:
        """
        Convert an error of a communication library into the failure of another process.

        Args:
            error (`BaseException`, *optional*): Any error.

        Returns:
            [`PeerFailedError`], *optional*: Error that names the process that ended and its error, if the process
            reported one. `None` if `error` is not about a lost connection.
        """
        if self.world_size == 1 or not isinstance(error, RuntimeError) or isinstance(error, PeerFailedError):
            return None
        return PeerFailedError(self._store.explain(error)) if is_lost_connection(error) else None

    @contextmanager
    def _explain_lost_connection(self) -> Iterator[None]:
        """Replace the error of a lost connection by the failure of the process that ended."""
        try:
            yield
        except RuntimeError as error:
            where = f" while process {self.rank} waited for it at {self._label!r}"
            raise PeerFailedError(self._store.explain(error, where)) from error

    def _finish(self) -> None:
        if self.failed is None:
            self._store.post("finished")
            self._wait_for_readers("finished")
        self._store.close()
        self._close_group()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait_for_readers(self, *events: str) -> None:
        # Without a launcher that runs the store, such as torchrun, the store ends with the main process.
        if self.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._store.wait_for_peers(*events, seconds=SHUTDOWN_WAIT_SECONDS)

    def _close_group(self) -> None:
        """Close the connections of the group, so that no process waits for this process."""
        if self._group is not None and dist.is_initialized():
            # The default group stays open. Without it, new training arguments would create another default group, for
            # which accelerate waits for all processes.
            dist.destroy_process_group(self._group)
        self._group = None  # The connections stay open as long as a reference to the group exists.


@functools.cache
def process_group() -> ProcessGroup:
    """Return the process group of this launch. Call it after accelerate is set up."""
    state = PartialState()
    return ProcessGroup(state.process_index, state.num_processes)


@contextmanager
def fail_together_during_init() -> Iterator[None]:
    """
    Apply [`~ProcessGroup.fail_together`] to the construction of a trainer, which sets up accelerate.

    Raises:
        LaunchFailedError: If an earlier run of this launch failed.
        PeerFailedError: If another process failed first. The message contains the error of that process.
    """
    # A failed launch must not wait for processes that have ended.
    if process_group.cache_info().currsize:
        process_group().raise_if_failed()
    try:
        yield
    except BaseException:
        if not dist.is_initialized():
            raise
        with process_group().fail_together():
            raise
