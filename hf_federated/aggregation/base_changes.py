"""Methods that change the base weights of LoRA modules, and how the changes reach the clients.

The global state of such a method contains the base weights of the LoRA modules. They are sent to no client. A client
receives the changes of all rounds since its last one as factors, `W ← W + L R` round by round, and adds them to the
weights that it keeps in its memory. If the factors have more values than the weights, or the server no longer has the
factors of an old round, it sends the weights.

The server and all clients add the changes with the same operations, on the CPU and in float64, so their weights are
equal bit for bit.

Weights that cannot be written (half precision, quantized or tied) remain as they are. The residual adapter
([`~hf_federated.adapters.residual.ResidualAdapter`]) then contains the changes, and its factors take the place of the
weights in the state. A change is appended: `L ← [L, L_new]`, `R ← [R; R_new]`. The server reduces a rank above the
limit, and then sends the whole factors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ..messages import ClientUpdate, Fit
from ..methods import Accumulator, ClientPart, Round, UpdateCollection
from ..utils.arguments import require
from ..utils.lora_modules import LoraModule, find_lora_modules
from ..utils.weighted_mean import State, Tensors
from .lora_factors import find_pairs
from .lora_method import LoraAggregation
from .residual_factors import check_factors, largest_rank, with_change, with_limited_rank


# The collection of the LoRA factors of the updates in an accumulator.
UPDATES = "updates"
# Setting of a request: the number of changes of the base weights so far.
VERSION = "base_version"
# Tensor of a request: the first change in it, and for each change its rank as a multiple of the rank of the adapter.
CHANGES = "base_changes"
LEFT, RIGHT = "/left", "/right"
# Names in the log: the largest rank of the residual adapter, and the largest share that a limit of the rank removed.
RESIDUAL_RANK, RESIDUAL_ERROR = "federated/lora_residual_rank", "federated/lora_residual_truncation"

# The left and the right factor of a change, by the name of the base weight.
Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Change(NamedTuple):
    """
    A change of the base weights.

    Args:
        multiple (`int`): The rank of the change as a multiple of the rank of the adapter.
        factors (`Mapping[str, tuple[torch.Tensor, torch.Tensor]]`): The factors by the name of the base weight.
    """

    multiple: int
    factors: Factors

    @property
    def num_values(self) -> int:
        """Number of values of the factors."""
        return sum(left.numel() + right.numel() for left, right in self.factors.values())


def add_change(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """
    Return `W + L R`, or `W + (L R)ᵀ` for an embedding and `Conv1D`.

    Args:
        weight (`torch.Tensor`): The base weight. The weight of a convolution has more axes.
        left (`torch.Tensor` of shape `(out, k)`): The left factor.
        right (`torch.Tensor` of shape `(k, in)`): The right factor.
        is_transposed (`bool`): Whether the weight has the shape `(in, out)`.
    """
    change = _wide(left) @ _wide(right)
    change = change.T if is_transposed else change
    return (_wide(weight) + change.reshape(weight.shape)).to(weight)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_meta else value.detach().cpu().double()


class BasePart(ClientPart):
    """Client half of [`BaseChangesAggregation`]: keep the base weights of this client, and add the sent changes."""

    _version = 0

    def receive(self, message: Fit) -> None:
        self._version = message.settings.get(VERSION, 0)

    def place(self, state: State) -> State:
        exchange = self.context.model.exchange
        if not exchange.base_parameters:
            return state
        weights = self.memory.get("weights") or exchange.initial_base
        if changed := self._changed(state, weights):
            weights = self.memory["weights"] = changed
            self.memory["version"] = self._version
        return {**{name: value for name, value in state.items() if name in exchange.parameters}, **weights}

    def _changed(self, state: State, weights: State) -> State:
        """Return the base weights of this round, or an empty dictionary if they did not change."""
        version = self.memory.get("version", 0)
        if sent := {name: state[name].clone() for name in weights if name in state}:
            if sent.keys() != weights.keys():
                raise ValueError(f"the server sent {len(sent)} of {len(weights)} base weights")
            self._check(sent, weights)
            return sent
        if version == self._version:
            return {}
        first, *multiples = state[CHANGES].tolist() if not state[CHANGES].is_meta else (version,)
        if not first <= version <= self._version == first + len(multiples):
            raise ValueError(
                f"the server sent changes {first} to {first + len(multiples)} of the base weights, but this client "
                f"has the weights after change {version}"
            )
        if min(multiples) < 1:
            raise ValueError(f"the server sent the ranks {multiples} of the changes; each is at least 1")
        changed: State = {}
        for module in self._modules():
            changed |= _add_all(module, weights, state, multiples, version - first)
        self._check(changed, weights)
        return changed

    def _modules(self) -> Iterable[LoraModule]:
        return find_lora_modules(self.context.model.trainer.model).values()

    def _check(self, weights: State, known: State) -> None:
        """Check the shapes of base weights, or of the factors of the residual adapter."""
        for module in self._modules():
            if module.has_residual:
                check_factors(module, weights, known, self.method.max_residual_rank)
            elif weights[module.base].shape != known[module.base].shape:
                shapes = tuple(weights[module.base].shape), tuple(known[module.base].shape)
                raise ValueError(f"the server sent {module.base!r} with the shape {shapes[0]}, expected {shapes[1]}")

    def send(self, update: ClientUpdate) -> ClientUpdate:
        base = self.context.model.exchange.base_parameters
        state = {name: value for name, value in update.state.items() if name not in base}
        return dataclasses.replace(update, state=state)


def _add_all(module: LoraModule, weights: State, state: State, multiples: Sequence[int], start: int) -> State:
    """Add the changes of a module from a position, one after the other."""
    left, right = state[module.base + LEFT], state[module.base + RIGHT]
    ranks = [multiple * left.shape[1] // sum(multiples) for multiple in multiples]
    lefts, rights = left.split(ranks, 1), right.split(ranks)
    changed = {name: weights[name] for name in module.changed_names}
    for left, right in zip(lefts[start:], rights[start:], strict=True):
        changed = _with_change(module, changed, left, right)
    return changed


def _with_change(module: LoraModule, state: Tensors, left: torch.Tensor, right: torch.Tensor) -> State:
    """Return the base weight after a change, or the factors of the residual adapter with the change."""
    if module.has_residual:
        return with_change(module, state, left, right)
    return {module.base: add_change(state[module.base], left, right, module.is_transposed)}


class BaseChangesAggregation(LoraAggregation):
    """
    Base class of the methods that change the base weights of LoRA modules.

    The server keeps the LoRA factors of all updates of a round. A subclass calls
    [`~BaseChangesAggregation.change_base`] in `aggregate`. `changes_base` is `True`.

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update, as in [`Aggregation`].
        max_residual_rank (`int`, *optional*):
            Largest rank of the changes of a module, if the base weights cannot be written. Defaults to the smaller
            dimension of the module.
    """

    client_part: ClassVar[type[ClientPart]] = BasePart
    supports_late_updates: ClassVar[bool] = False

    def __init__(self, weighting: str = "examples", max_residual_rank: int | None = None) -> None:
        super().__init__(weighting)
        require(
            "max_residual_rank", max_residual_rank, max_residual_rank is None or max_residual_rank >= 1, "at least 1"
        )
        self.max_residual_rank = max_residual_rank
        # The rank of the residual adapter, and what a limit of the rank removed, by the name in the log.
        self.residual_logs: dict[str, float] = {}
        # By the name of the factor `A`.
        self._modules: dict[str, LoraModule] = {}
        # The last changes, with the number of the first one.
        self._changes: list[Change] = []
        self._first = 0
        # The number of changes that the weights of a client have. Other clients have the initial weights.
        self._versions: dict[str, int] = {}
        self._accepted: list[str] = []

    @property
    def _version(self) -> int:
        return self._first + len(self._changes)

    @property
    def base_names(self) -> set[str]:
        """Names of the base weights, or of the factors of the residual adapter, in the global state."""
        modules = self._modules.values() if self.changes_base else ()
        return {name for module in modules for name in module.changed_names}

    @property
    def resized_names(self) -> set[str]:
        return {name for module in self._modules.values() if module.has_residual for name in module.changed_names}

    def check_setup(self, args: Any, config: Any) -> None:
        super().check_setup(args, config)
        if self.changes_base and args.load_best_model_at_end and args.save_only_model:
            raise ValueError(
                f"load_best_model_at_end=True with save_only_model=True and {self!r}: the checkpoints have another "
                "form than the model, so the best one cannot be loaded. Set save_only_model=False."
            )

    def check_model(self, model: nn.Module, peft_configs: Mapping[str, Any]) -> None:
        self._modules = find_lora_modules(model)

    def setup(self, num_rounds: int, num_clients: int) -> None:
        self._changes, self._first, self._versions = [], 0, {}

    # ---- Messages

    def fit_settings(self) -> dict[str, Any]:
        return {VERSION: self._version} if self.changes_base else {}

    def state_for(self, client_id: str, state: State) -> State:
        if not (base := self.base_names):
            return state
        sent = {name: value for name, value in state.items() if name not in base}
        first = self._versions.get(client_id, 0)
        if first == self._version:
            return sent
        pending = self._changes[first - self._first :]
        num_values = sum(change.num_values for change in pending)
        if first < self._first or num_values >= sum(state[name].numel() for name in base):
            return {**sent, **{name: state[name] for name in base}}
        sent[CHANGES] = torch.tensor([first, *(change.multiple for change in pending)])
        for name in sorted(pending[0].factors):
            sent[name + LEFT] = torch.cat([change.factors[name][0] for change in pending], 1)
            sent[name + RIGHT] = torch.cat([change.factors[name][1] for change in pending])
        return sent

    def expected_for(self, client_id: str, state: State) -> State:
        base = self.base_names
        return {name: value for name, value in state.items() if name not in base} if base else state

    def whole_update(self, update: ClientUpdate, state: Tensors) -> ClientUpdate:
        base = {name: state[name] for name in self.base_names if name in state}
        return dataclasses.replace(update, state={**update.state, **base}) if base else update

    # ---- Sums

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        factors = {name: state[name] for pair in find_pairs(state) for name in (pair.a, pair.b)}
        left_out = self.base_names if self.averages_both_factors else self.base_names | factors.keys()
        averaged = {name: value for name, value in state.items() if name not in left_out}
        accumulator = super().accumulator(averaged, extra)
        accumulator.collections[UPDATES] = UpdateCollection(factors)
        return accumulator

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        updates = accumulator.collections[UPDATES]
        updates.add(update.client_id, update.state, self.weight(update))
        left_out = self.base_names if self.averages_both_factors else self.base_names | updates.reference.keys()
        averaged = {name: value for name, value in update.state.items() if name not in left_out}
        super().accumulate(accumulator, dataclasses.replace(update, state=averaged))

    # ---- Changes

    def change_base(self, multiple: int, factors: Factors, state: State, client_ids: Sequence[str]) -> State:
        """
        Add a change to the base weights, and keep its factors for the clients.

        Args:
            multiple (`int`): The rank of the change as a multiple of the rank of the adapter. 0 for no change.
            factors (`Mapping[str, tuple[torch.Tensor, torch.Tensor]]`): `L` of shape `(out, multiple · r)` and `R` of
                shape `(multiple · r, in)`, by the name of the base weight.
            state (`dict[str, torch.Tensor]`): The global state.
            client_ids (`Sequence[str]`): The clients whose updates are in the change.

        Returns:
            `dict[str, torch.Tensor]`: The new base weights by name.
        """
        self._versions |= dict.fromkeys(client_ids, self._version)
        self._accepted = list(client_ids)
        if multiple == 0:
            return {name: state[name] for name in self.base_names}
        modules = {module.base: module for module in self._modules.values()}
        cast: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        changed: State = {}
        for name, (left, right) in factors.items():
            like = state[modules[name].changed_names[0]]
            cast[name] = left.to(like), right.to(like)
            changed |= _with_change(modules[name], state, *cast[name])
        self._changes.append(Change(multiple, cast))
        if any(module.has_residual for module in modules.values()):
            changed = self._limit_ranks(changed)
        # More values than these are never sent.
        largest = sum(value.numel() for value in changed.values())
        while self._changes and sum(change.num_values for change in self._changes) >= largest:
            self._changes.pop(0)
            self._first += 1
        return changed

    def _limit_ranks(self, state: State) -> State:
        """Reduce the ranks of the residual adapter to the limit. All clients then receive the whole factors."""
        limited, errors = dict(state), [0.0]
        for module in self._modules.values():
            if limited[module.changed_names[0]].shape[1] > largest_rank(module, state, self.max_residual_rank):
                factors, error = with_limited_rank(module, state, self.max_residual_rank)
                limited |= factors
                errors.append(error)
        if len(errors) > 1:
            self._first, self._changes = self._version, []
        ranks = [limited[module.changed_names[0]].shape[1] for module in self._modules.values()]
        self.residual_logs = {RESIDUAL_RANK: max(ranks), RESIDUAL_ERROR: max(errors)}
        return limited

    def finish(self, round: Round) -> State:
        state = super().finish(round)
        for client_id in set(round.cohort) - set(self._accepted):
            # The client may have lost its weights.
            self._versions.pop(client_id, None)
        round.logs.update(self.residual_logs)
        return state

    def state_dict(self) -> dict[str, Any]:
        if not self.changes_base:
            return {}
        changes = [
            {"multiple": change.multiple, "factors": {name: list(pair) for name, pair in change.factors.items()}}
            for change in self._changes
        ]
        return {"first": self._first, "changes": changes, "versions": dict(self._versions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.changes_base:
            return
        self._first, self._versions = state["first"], dict(state["versions"])
        self._changes = [
            Change(each["multiple"], {name: (left, right) for name, (left, right) in each["factors"].items()})
            for each in state["changes"]
        ]
