"""Parties of a split model, each with separate parameters and a separate optimizer, and their joint step.

The parties share one number per step: the norm of the gradients of all parties, `√Σ‖g_part‖²`. Each party clips its
gradients by this norm, so clipping is the same as in the full model.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from ..aggregation import WeightedMean


class Party:
    """
    A party that trains a part of the model: a client or the server.

    Args:
        name (`str`): Name, unique among the parties of a run.
        module (`torch.nn.Module`): The part that the party owns.
        optimizer (`torch.optim.Optimizer`, *optional*): Optimizer of the trained parameters; `None` if all parameters
            are frozen.
    """

    def __init__(self, name: str, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.name = name
        self.module = module
        self.optimizer = optimizer

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name. A shared parameter is listed once."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def state(self) -> dict[str, torch.Tensor]:
        """Values of the trained parameters, without a copy."""
        return {name: parameter.detach() for name, parameter in self.trained_parameters().items()}

    def check(self, state: Mapping[str, torch.Tensor], origin: str = "a state") -> None:
        """
        Compare the names and shapes of values with the trained parameters.

        Args:
            state (`Mapping[str, torch.Tensor]`): The values, by name.
            origin (`str`, *optional*, defaults to `"a state"`): Source of the values, for the error message.

        Raises:
            ValueError: If a name or a shape differs.
        """
        parameters = self.trained_parameters()
        if mismatched := sorted(parameters.keys() ^ state.keys()):
            raise ValueError(
                f"The trained parameters of {self.name!r} and {origin} have different names: {mismatched[:3]}. Use "
                "the same model and the same adapter."
            )
        for name, parameter in parameters.items():
            if parameter.shape != state[name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(parameter.shape)} in {self.name!r}, but shape "
                    f"{tuple(state[name].shape)} in {origin}. Use the same model and the same adapter."
                )

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Replace the values of the trained parameters.

        Raises:
            ValueError: If a name or a shape differs.
        """
        self.check(state)
        for name, parameter in self.trained_parameters().items():
            parameter.copy_(state[name])

    def squared_norm(self) -> float:
        """Squared norm of the gradients."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0

    def step(self, norm: float, max_norm: float) -> None:
        """
        Clip the gradients, run the optimizer, and reset the gradients.

        Args:
            norm (`float`): Norm of the gradients of all parties that share a model.
            max_norm (`float`): `max_grad_norm` of the training arguments; 0 disables clipping.
        """
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, torch.tensor(norm))
        if self.optimizer is not None:
            self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Reset the gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None


def total_norm(squared_norms: Iterable[float]) -> float:
    """Norm of the gradients of several parties, from their squared norms."""
    return math.sqrt(math.fsum(squared_norms))


def averaging_weights(num_examples: Mapping[str, int]) -> dict[str, int]:
    """
    Return the weight of each client in an average: its number of examples since the last average.

    Clients without examples are left out. If no client has examples, all clients have weight 1.

    Args:
        num_examples (`Mapping[str, int]`): Number of examples since the last average, by client id.
    """
    trained = {client_id: number for client_id, number in num_examples.items() if number}
    return trained or dict.fromkeys(num_examples, 1)


def average_parties(parties: Mapping[str, Party], num_examples: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """
    Return the mean of trained parameters, weighted by the examples since the last average.

    Args:
        parties (`Mapping[str, Party]`): The party whose parameters a client uses, by client id.
        num_examples (`Mapping[str, int]`): Number of examples since the last average, by client id.
    """
    mean = WeightedMean()
    for client_id, weight in averaging_weights(num_examples).items():
        mean.add(parties[client_id].state(), weight)
    return mean.finalize()


class JointOptimizer(torch.optim.Optimizer):
    """
    Optimizer of a trainer that runs the optimizers of all parties together.

    Args:
        parties (`Mapping[str, Party]`): All parties, by name.
        max_grad_norm (`float`): As in the training arguments.
        shared_norm (`Callable[[float], float | None]`, *optional*): Computes the norm of a group from the squared norm
            of its parties in this process. In a networked run it adds the gradients of the remote parties. It returns
            `None` if the group must not take the step.

    Attributes:
        groups (`list[list[str]]`): Names of the parties that take the next step. The parties of a group share a model
            and clip by one norm. The training step sets this attribute.
        norm (`float`): Norm of the gradients of the last step before clipping, averaged over the groups.
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
        self._optimizers = [party.optimizer for party in parties.values() if party.optimizer is not None]
        # The parties' optimizers share these dictionaries, so a schedule also sets their learning rates.
        groups = self._collect_param_groups() or [{"params": [nn.Parameter(torch.zeros(()))], "lr": 0.0}]
        # Schedules read the initial learning rate from the defaults, which are equal for all parties.
        super().__init__(groups, self._optimizers[0].defaults if self._optimizers else {"lr": 0.0})

    def _collect_param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch declares two overloads
        """
        Clip the gradients of each group by the norm of the group, and run the optimizers.

        Raises:
            ValueError: If the gradients of a party are not finite. In this case no party takes the step.
        """
        groups = [[self.parties[name] for name in names] for names in self.groups]
        squared_norms = [[member.squared_norm() for member in members] for members in groups]
        # Check all parties before the first update. If the run ends here, all parties are at the same step.
        for name, square in zip(itertools.chain(*self.groups), itertools.chain(*squared_norms), strict=True):
            if not math.isfinite(square):
                raise ValueError(f"The gradients of {name!r} are not finite. Lower the learning rate.")
        norms = []
        for members, member_squares in zip(groups, squared_norms, strict=True):
            norm = self.shared_norm(math.fsum(member_squares))
            if norm is None:
                continue
            norms.append(norm)
            for member in members:
                member.step(norm, self.max_grad_norm)
        self.groups = []
        if norms:
            self.norm = math.fsum(norms) / len(norms)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parties."""
        for party in self.parties.values():
            party.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary. The state of each party's optimizer is saved with the party's part."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refresh the parameter groups after the states of the parties' optimizers were loaded."""
        self.param_groups = self._collect_param_groups() or self.param_groups


def num_training_steps(args: TrainingArguments, steps_per_epoch: int) -> int:
    """Number of optimizer steps of a run, as `Trainer` computes it."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)


def create_optimizers(parties: Iterable[Party], args: TrainingArguments, max_steps: int) -> list[Any]:
    """
    Create the optimizer of every party that has trained parameters, as `Trainer` does.

    Returns:
        `list[LRScheduler]`: The learning rate schedule of each optimizer.
    """
    args = copy.copy(args)
    # `Trainer` creates a repository if it pushes to the Hub, and requires a dataset if it evaluates.
    args.push_to_hub = False
    args.eval_strategy = IntervalStrategy.NO
    schedulers = []
    for party in parties:
        if not party.trained_parameters():
            continue
        # The trainer only creates optimizers for other modules.
        trainer = Trainer(nn.Identity(), args)
        party.optimizer = trainer.create_optimizer(party.module)
        schedulers.append(trainer.create_scheduler(max_steps, party.optimizer))
    return schedulers
