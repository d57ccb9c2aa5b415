"""`WeightedMean`: streaming mean for all averaging algorithms, independent of the order and grouping of updates."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from .lazy_tensors import LazyTensors
from .weighted_sums import WeightedSums, check_shapes, pieces_of, shapes_of, weighted_changes


State = dict[str, torch.Tensor]
# Tensors by name that are only read.
Tensors = Mapping[str, torch.Tensor]

# Number of values that are converted at a time.
PIECE = 2**18


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of values that the server keeps: float32, or `dtype` if it is wider."""
    return torch.promote_types(dtype, torch.float32)


@functools.cache
def _accumulation_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """
    Return the dtype in which the values of a tensor are summed.

    It is so wide that the effect of the order of additions disappears when the mean is rounded. The mean then does not
    depend on the assignment of clients to processes. GPUs of Apple do not support float64.
    """
    wider = torch.float64 if dtype.itemsize >= 4 and device_type != "mps" else torch.float32
    return torch.promote_types(dtype, wider)


def _check_weight(weight: float) -> None:
    if not 0 < weight < float("inf"):
        raise ValueError(f"A weight must be positive and finite, got {weight}.")


def _center_of(name: str, reference: torch.Tensor, center: Mapping[str, torch.Tensor] | None) -> torch.Tensor | None:
    """Return the center of a tensor, or `None` if there is none of its name and shape."""
    value = None if center is None else center.get(name)
    return value if value is not None and value.shape == reference.shape else None


def _add(totals: list[torch.Tensor], values: list[torch.Tensor], weight: float) -> None:
    """`total += weight · value` for each pair, where the values have a narrower dtype."""
    small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for total, value in zip(totals, values, strict=True):
        if total.device != value.device:
            value = value.to(total.device)
        if total.numel() <= PIECE or not total.is_cpu or total.dtype == value.dtype:
            small[0].append(total)
            small[1].append(value)
            continue
        # On a CPU the conversion needs memory. Pieces of it stay in the cache.
        length = max(1, PIECE // (total.numel() // total.shape[0]))
        for part, addend in zip(total.split(length), value.split(length), strict=True):
            part.add_(addend, alpha=weight)
    if small[0]:
        torch._foreach_add_(*small, alpha=weight)


class WeightedMean:
    """
    Streaming weighted mean of states, `Σ_i w_i x_i / Σ_i w_i`, summed in float64 (float32 for half precision).

    The mean keeps one sum for any number of states. If the weights are integers, the products are exact. The sums are
    exact too if a value differs between clients by less than five orders of magnitude. The mean then depends neither
    on the order of additions nor on the assignment of clients to processes. The mean of one state, or of any number of
    equal states in a dtype narrower than float64, is equal to the state bit for bit. Integer and boolean tensors are
    not averaged: the mean contains the tensors of the first state, or of the last state that was added while
    `takes_others` was set.

    Args:
        reference (`Mapping[str, torch.Tensor]`, *optional*):
            Tensors with the names, shapes and dtypes of the states. It is required with several processes, because a
            process may receive no update. The values are not used.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation import WeightedMean

    >>> mean = WeightedMean()
    >>> mean.add({"w": torch.tensor([1.0])}, weight=1)
    >>> mean.add({"w": torch.tensor([4.0])}, weight=2)
    >>> mean.finalize()
    {'w': tensor([3.])}
    ```
    """

    def __init__(self, reference: Mapping[str, torch.Tensor] | None = None) -> None:
        self._reference = reference
        self.total_weight = 0.0
        self.num_updates = 0
        # With one state, the unweighted state. With several states, their weighted sum.
        self._sums: State = {}
        self._others: State = {}
        # Whether the next state replaces the integer and boolean tensors.
        self.takes_others = False
        # Whether the mean copies its first state. If not, `_sums` contains the tensors of the caller.
        self._copies = True
        self._dtypes: dict[str, torch.dtype] = {}
        # Quotients of a piece of a tensor.
        self._scratch: torch.Tensor | None = None

    def add(self, state: Mapping[str, torch.Tensor], weight: float) -> None:
        """
        Add a state to the mean.

        Args:
            state (`Mapping[str, torch.Tensor]`): Tensors with the same names and shapes in every call.
            weight (`float`): Weight of the state, positive.

        Raises:
            ValueError: If the weight is not positive and finite.
        """
        _check_weight(weight)
        if self.num_updates == 0:
            self._start(state, copy=True)
        else:
            self._make_sum()
            _add(list(self._sums.values()), [state[name] for name in self._sums], weight)
            if self.takes_others:
                self._others = {name: state[name].clone() for name in self._others}
        self.total_weight += weight
        self.num_updates += 1

    def _start(self, state: Mapping[str, torch.Tensor], copy: bool) -> None:
        for name, value in state.items():
            self._dtypes[name] = value.dtype
            if not value.is_floating_point():
                self._others[name] = value.clone()
                continue
            dtype = _accumulation_dtype(value.dtype, value.device.type)
            if not copy:
                self._sums[name] = torch.zeros_like(value, dtype=dtype)
            else:
                self._sums[name] = value.to(dtype, copy=True) if self._copies else value

    def _copy_state(self) -> None:
        """Replace the tensors of the caller by copies in the dtype of the sums."""
        if not self._copies:
            self._copies = True
            dtypes = {name: _accumulation_dtype(value.dtype, value.device.type) for name, value in self._sums.items()}
            self._sums = {name: value.to(dtypes[name], copy=True) for name, value in self._sums.items()}

    def _make_sum(self) -> None:
        self._copy_state()
        if self.num_updates == 1 and self._sums:
            torch._foreach_mul_(list(self._sums.values()), self.total_weight)

    def merge(self, other: WeightedMean, takes_others: bool = False) -> None:
        """
        Add all states of another mean, whose sums may be changed.

        Args:
            other ([`WeightedMean`]): A mean of states with the same names, shapes and dtypes.
            takes_others (`bool`, *optional*, defaults to `False`): Whether the integer and boolean tensors of the
                other mean replace those of this mean.
        """
        if other.num_updates == 0:
            return
        self._copy_state()
        other._copy_state()
        if self.num_updates == 0:
            self._sums, self._others, self._dtypes = other._sums, other._others, other._dtypes
        else:
            self._make_sum()
            other._make_sum()
            if self._sums:
                torch._foreach_add_(list(self._sums.values()), [other._sums[name] for name in self._sums])
            if takes_others:
                self._others = other._others
        self.total_weight += other.total_weight
        self.num_updates += other.num_updates

    @property
    def other_names(self) -> list[str]:
        """Names of the integer and boolean tensors of the reference."""
        return [name for name, value in (self._reference or {}).items() if not value.is_floating_point()]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the floating tensors of the reference, by name, in its order."""
        return shapes_of(self._floating_references())

    def empty(self, copies: bool = True) -> WeightedMean:
        """
        Return a mean of no states with the same reference.

        Args:
            copies (`bool`, *optional*, defaults to `True`): Whether the mean copies its first state. If not, the mean
                refers to the tensors of this state, which must not change, until it needs a copy.
        """
        mean = WeightedMean(self._reference)
        mean._copies = copies
        return mean

    def sums(self, center: Mapping[str, torch.Tensor] | None = None, lazy: bool = False) -> WeightedSums:
        """
        Return the sums of the floating tensors.

        The sums have the names and the order of the reference, also if no state was added. For one state in a dtype
        narrower than float64, the product of an integer weight and the state is exact. The difference from a center
        with values of similar magnitude is exact too. Sums of other means are exact within the limits of the class.

        Args:
            center (`Mapping[str, torch.Tensor]`, *optional*): Tensors to subtract from the states, such as the global
                state, so that the sums contain changes. A tensor without a center of its name and shape has center 0.
            lazy (`bool`, *optional*, defaults to `False`): Whether the values are [`LazyTensors`], which are computed
                from the mean and the center each time they are read. Both must not change before.

        Returns:
            [`WeightedSums`]: The sums, on the devices of the states. GPUs of Apple do not support float64, so their
                sums are on the CPU.

        Raises:
            ValueError: If the tensors of the states are not those of the reference.
        """
        references = self._floating_references()
        if self.num_updates:
            check_shapes(self._sums, shapes_of(references))
        sources = {name: self._sums.get(name, reference) for name, reference in references.items()}
        centers = {name: _center_of(name, reference, center) for name, reference in references.items()}
        weight, num_updates = self.total_weight, self.num_updates
        values = LazyTensors(
            shapes_of(references), lambda name: weighted_changes(sources[name], centers[name], weight, num_updates)
        )
        return WeightedSums(weight, num_updates, values if lazy else dict(values))

    @torch.no_grad()
    def add_sums(self, sums: WeightedSums, center: Mapping[str, torch.Tensor] | None = None) -> None:
        """
        Add the states of sums, as if [`~WeightedMean.add`] had been called with each of them.

        Sums contain no integer and boolean tensors. The mean takes those of the reference if it has none.

        Args:
            sums ([`WeightedSums`]): Return value of [`~WeightedMean.sums`], or a sum of such values.
            center (`Mapping[str, torch.Tensor]`, *optional*): The center that was passed to `sums`.

        Raises:
            ValueError: If the names and shapes are not those of the reference, or if the weight is not positive and
                finite.
        """
        references = self._floating_references()
        check_shapes(sums.values, shapes_of(references))
        if sums.num_updates == 0:
            return
        _check_weight(sums.weight)
        loaded = self.empty()
        loaded._start(self._reference or {}, copy=False)
        loaded.total_weight, loaded.num_updates = sums.weight, sums.num_updates
        is_single = sums.num_updates == 1
        factor = 1.0 if is_single else sums.weight
        for name, reference in references.items():
            own = _center_of(name, reference, center)
            centers = None if own is None else own.detach().reshape(-1)
            flat, start = loaded._sums[name].reshape(-1), 0
            for piece in pieces_of(sums.values, name, PIECE):
                stop = start + len(piece)
                piece = piece.to(torch.float64)
                if is_single:
                    piece = piece / sums.weight
                if centers is not None:
                    piece = piece.add(centers[start:stop].to(piece), alpha=factor)
                flat[start:stop] = piece
                start = stop
            if not loaded._sums[name].is_contiguous():
                loaded._sums[name].copy_(flat.view(reference.shape))
        self.merge(loaded)

    def _floating_references(self) -> dict[str, torch.Tensor]:
        if self._reference is None:
            raise ValueError("A mean needs a reference for its sums. Pass `reference` to `WeightedMean`.")
        return {name: value for name, value in self._reference.items() if value.is_floating_point()}

    def reduction_tensors(
        self, total_weight: float, num_updates: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """
        Prepare the part of this process for a mean over several processes.

        The caller then replaces the tensors of the first list in place by their sums over the processes, and the
        tensors of the second list by the tensors of the process that added the first state. This object is then the
        mean over all processes.

        Args:
            total_weight (`float`): Sum of the weights over all processes.
            num_updates (`int`): Number of states added by all processes.

        Returns:
            `tuple`: List of tensors to sum and list of tensors to copy, in the order of the reference.

        Raises:
            ValueError: If this process added no state and has no `reference`.
        """
        if self.num_updates == 0:
            if self._reference is None:
                raise ValueError("A mean that processes reduce needs a reference for the processes without updates.")
            self._start(self._reference, copy=False)
        elif num_updates > 1:
            self._make_sum()
        self._copy_state()
        self.total_weight, self.num_updates = total_weight, num_updates
        # The order of the reference is the same in all processes. The order of a received state may differ.
        names = self._dtypes if self._reference is None else self._reference
        sums = [self._sums[name] for name in names if name in self._sums]
        return sums, [self._others[name] for name in names if name in self._others]

    def finalize(self, wide: bool = False) -> State:
        """
        Return the mean.

        Args:
            wide (`bool`, *optional*, defaults to `False`): Whether to return the mean in the dtype of the sums instead
                of the dtype of the states.

        Returns:
            `dict[str, torch.Tensor]`: Mean of the floating tensors, and the other tensors of the first state.

        Raises:
            ValueError: If no state was added.
        """
        if self.num_updates == 0:
            raise ValueError("The mean of no updates is undefined.")
        return {name: self.mean_of(name, wide) for name in self._dtypes}

    def mean_of(self, name: str, wide: bool = False) -> torch.Tensor:
        """
        Return the mean of one tensor, as in [`~WeightedMean.finalize`].

        Wide means are twice as large as the states. This method avoids holding the wide means of all tensors in memory
        at the same time.

        Args:
            name (`str`): Name of the tensor.
            wide (`bool`, *optional*, defaults to `False`): Whether to return the mean in the dtype of the sums.

        Returns:
            `torch.Tensor`: Mean of the tensor, or the tensor of the first state if it is not floating.

        Raises:
            ValueError: If no state was added.
        """
        if self.num_updates == 0:
            raise ValueError("The mean of no updates is undefined.")
        if name in self._others:
            return self._others[name]
        self._copy_state()
        total = self._sums[name]
        if self.num_updates == 1:
            return total if wide else total.to(self._dtypes[name])
        if wide or total.dtype == self._dtypes[name] or total.device.type != "cpu" or not total.is_contiguous():
            mean = total / self.total_weight
            return mean if wide else mean.to(self._dtypes[name])
        # Large temporary tensors between the means would fragment the memory.
        if self._scratch is None or self._scratch.dtype != total.dtype:
            self._scratch = torch.empty(PIECE, dtype=total.dtype)
        mean = torch.empty_like(total, dtype=self._dtypes[name])
        for part, values in zip(mean.view(-1).split(PIECE), total.view(-1).split(PIECE), strict=True):
            part.copy_(torch.div(values, self.total_weight, out=self._scratch[: len(values)]))
        return mean
