"""Those who own parts of a split model: each has its own parameters and its own optimizer.

What a step needs of several parties at once is one number, the norm of all their gradients together, by which each
clips its own: `√Σ‖g_part‖²`, as of the unsplit model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy


class Party:
    """
    Someone who trains a part of the model.

    Args:
        name (`str`): Unique among the parties of a run.
        module (`torch.nn.Module`): What it owns.
        optimizer (`torch.optim.Optimizer`, *optional*): Of what it trains; none where all is frozen.
    """

    def __init__(self, name: str, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.name = name
        self.module = module
        self.optimizer = optimizer

    def trained(self) -> dict[str, nn.Parameter]:
        """What it trains, by name; a shared parameter once."""
        return {name: own for name, own in self.module.named_parameters() if own.requires_grad}

    def state(self) -> dict[str, torch.Tensor]:
        """The values of what it trains; not copies."""
        return {name: own.detach() for name, own in self.trained().items()}

    def check(self, state: Mapping[str, torch.Tensor], origin: str = "a state") -> None:
        """
        Compare values with what it trains.

        Args:
            state (`Mapping[str, torch.Tensor]`): The values, by name.
            origin (`str`, *optional*, defaults to `"a state"`): Where they come from, for errors.

        Raises:
            ValueError: If a name or a shape is another one.
        """
        own = self.trained()
        if own.keys() != state.keys():
            different = sorted(own.keys() ^ state.keys())
            raise ValueError(f"{self.name!r} trains other parameters than {origin} holds: {different[:3]}.")
        for name, parameter in own.items():
            if parameter.shape != state[name].shape:
                raise ValueError(
                    f"{name} of {self.name!r} has shape {tuple(parameter.shape)}, and {tuple(state[name].shape)} in "
                    f"{origin}."
                )

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Go on from other values of what it trains.

        Raises:
            ValueError: If a name or a shape is another one.
        """
        self.check(state)
        for name, parameter in self.trained().items():
            parameter.copy_(state[name])

    def squared_norm(self) -> float:
        """The square of the norm of its gradients."""
        gradients = [own.grad for own in self.module.parameters() if own.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0

    def step(self, norm: float, max_norm: float) -> None:
        """
        Clip, step, and forget the gradients.

        Args:
            norm (`float`): Of the gradients of all parties that share a model.
            max_norm (`float`): `max_grad_norm` of the training arguments; 0 clips nothing.
        """
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, torch.tensor(norm))
        if self.optimizer is not None:
            self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None


def total_norm(squared_norms: Iterable[float]) -> float:
    """The norm of all parties' gradients together."""
    return math.sqrt(math.fsum(squared_norms))


class JointOptimizer(torch.optim.Optimizer):
    """
    In a trainer's place for an optimizer: those of all parties, which step together.

    Args:
        parties (`Mapping[str, Party]`): All parties.
        max_grad_norm (`float`): As in the training arguments.
        shared_norm (`Callable[[float], float | None]`, *optional*): From the squared norm of a group's gradients here,
            that of everybody who shares its model, some of whom are elsewhere; `None` where it must not step.

    Attributes:
        groups (`list[list[str]]`): Who steps next: parties that clip by one norm, which share a model. What trains
            sets it.
        norm (`float`): Of the last step that a party took, before clipping: the mean over the groups.
    """

    def __init__(
        self,
        parties: Mapping[str, Party],
        max_grad_norm: float,
        shared_norm: Callable[[float], float | None] = math.sqrt,
    ) -> None:
        self.parties = parties
        self.shared_norm = shared_norm
        self.max_grad_norm = max_grad_norm
        self.groups: Sequence[Sequence[str]] = []
        self.norm = 0.0
        optimizers = [party.optimizer for party in parties.values() if party.optimizer is not None]
        # The same dictionaries as theirs: a schedule that sets a learning rate here sets it there.
        groups = self._param_groups() or [{"params": [nn.Parameter(torch.zeros(()))], "lr": 0.0}]
        # Schedules read the first learning rate there; all were made from one set of arguments.
        super().__init__(groups, optimizers[0].defaults if optimizers else {"lr": 0.0})

    def _param_groups(self) -> list[dict[str, Any]]:
        own = [party.optimizer for party in self.parties.values() if party.optimizer is not None]
        return [group for optimizer in own for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch declares two overloads
        """
        Clip and step, every group of parties by its own norm.

        Raises:
            ValueError: If a party's gradients are not finite, by which the others of its group would clip theirs.
                Nobody has stepped then.
        """
        groups = [[self.parties[name] for name in names] for names in self.groups]
        squares = [[member.squared_norm() for member in members] for members in groups]
        # Before anybody steps: of a run that ends here nobody is a step ahead of the others.
        for members, own_squares in zip(groups, squares, strict=True):
            for member, square in zip(members, own_squares, strict=True):
                if not math.isfinite(square):
                    raise ValueError(f"The gradients of {member.name!r} are not finite: lower the learning rate.")
        norms = []
        for members, own_squares in zip(groups, squares, strict=True):
            norm = self.shared_norm(math.fsum(own_squares))
            if norm is None:
                continue
            norms.append(norm)
            for member in members:
                member.step(norm, self.max_grad_norm)
        self.groups = []
        if norms:
            self.norm = math.fsum(norms) / len(norms)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget everybody's gradients."""
        for party in self.parties.values():
            party.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Empty: each party's state lies with its own part."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the parties' optimizers as they are now."""
        self.param_groups = self._param_groups() or self.param_groups


def number_of_steps(args: TrainingArguments, steps_in_epoch: int) -> int:
    """Optimizer steps of a run, as `Trainer` counts them."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_in_epoch)


def create_optimizers(parties: Iterable[Party], args: TrainingArguments, max_steps: int) -> list[Any]:
    """
    Give every party that trains anything the optimizer that `Trainer` would make.

    Returns:
        `list[LRScheduler]`: The schedule of each.
    """
    args = copy.copy(args)
    # A trainer that may push creates its repository when it is built, and one that evaluates asks for rows.
    args.push_to_hub = False
    args.eval_strategy = IntervalStrategy.NO
    schedulers = []
    for party in parties:
        if not party.trained():
            continue
        trainer = Trainer(_Unused(), args)
        party.optimizer = trainer.create_optimizer(party.module)
        schedulers.append(trainer.create_scheduler(max_steps, party.optimizer))
    return schedulers


class _Unused(nn.Module):
    """In the place of a model: an optimizer is made for a part."""
