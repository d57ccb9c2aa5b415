"""`Exchange`: which values of a model travel, read and written in one fused copy.

What travels is what trains. For a PEFT model these are the parameters of the active adapter and of `modules_to_save`,
in their trainable form: prompt-learning methods with a reparameterising encoder (p-tuning, prefix tuning with
`prefix_projection`) are exchanged as encoder weights, because the materialised prompts that
`get_peft_model_state_dict` returns cannot be trained further. They are materialised when the model is saved.

Everything that training could change without sending it is put back with every write, so that one client's buffers
never reach the next client on a resident model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn


class AnotherModelError(ValueError):
    """What a client kept is not of the model that it has now. It ends the run: it is no one client's fault."""


class Exchange:
    """
    The exchanged part of one model.

    A parameter that is shared by two modules (tied weights) has one name here and travels once. Buffers travel with
    the trainable modules that own them: floating ones are aggregated, integer ones copied.

    Args:
        model (`torch.nn.Module`):
            The model, also a `PeftModel`. Replacing its parameters by others calls for a new `Exchange`.
        what (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"trainable"`, `"adapter"` or `"all"`, as [`FederatedConfig`] explains.

    Raises:
        ValueError: If nothing would travel, if `"adapter"` is asked of a model without one, or if parameters outside
            the adapter train but would not travel.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.adapters import Exchange

    >>> model = torch.nn.Linear(2, 1)
    >>> exchange = Exchange(model)
    >>> state = exchange.read()
    >>> exchange.write({name: torch.zeros_like(value) for name, value in state.items()})
    >>> model.weight.sum().item()
    0.0
    ```
    """

    def __init__(self, model: nn.Module, what: str = "auto") -> None:
        is_adapter = isinstance(model, PeftModel)
        if what == "adapter" and not is_adapter:
            raise ValueError(
                f"exchange='adapter' needs a PEFT model, got {type(model).__name__}. Wrap it with "
                "`peft.get_peft_model`, or use exchange='trainable'."
            )
        self.kind = (
            "adapter" if what == "adapter" or (what == "auto" and is_adapter) else what.replace("auto", "trainable")
        )
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if self.kind == "all" or parameter.requires_grad
        }
        if self.kind == "adapter":
            self._check_only_adapter_trains(model)
        if not any(parameter.requires_grad for parameter in self.parameters.values()):
            raise ValueError(
                "No parameter of the model requires a gradient, so no client could train anything. Unfreeze some, or "
                "load the adapter with `is_trainable=True`."
            )
        self._trained = list(self.trainable)
        self._model = model
        self._buffers, staying = self._find_buffers(model)
        self._staying = {name: model.get_buffer(name).clone() for name in staying}

    @property
    def names(self) -> list[str]:
        """Names of what travels, in the order of the model."""
        return [*self.parameters, *self._buffers]

    @property
    def _live(self) -> list[torch.Tensor]:
        """What travels, where it is now: a model that is moved to another device has other storage and buffers."""
        buffers = [self._model.get_buffer(name) for name in self._buffers]
        return [*(parameter.detach() for parameter in self.parameters.values()), *buffers]

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """What travels, by name: the model's own tensors, without gradients, which the next training changes."""
        return dict(zip(self.names, self._live, strict=True))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The exchanged parameters that train, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def num_values(self) -> int:
        """How many scalars travel in one direction."""
        return sum(tensor.numel() for tensor in self._live)

    def check_unchanged(self, model: nn.Module) -> None:
        """
        Refuse a training that changed which parameters train, and freeze or unfreeze them again for the next client.

        Args:
            model (`torch.nn.Module`): The model of this exchange, after training.

        Raises:
            ValueError: If it did. The message names a parameter.
        """
        expected = {name: self.parameters[name] for name in self._trained}
        now = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if now.keys() == expected.keys():
            return
        added = {name: parameter for name, parameter in now.items() if name not in expected}
        removed = {name: parameter for name, parameter in expected.items() if name not in now}
        for parameter in added.values():
            parameter.requires_grad_(False)
        for parameter in removed.values():
            parameter.requires_grad_(True)
        changes = [f"{next(iter(part))!r} {verb}" for part, verb in ((added, "began"), (removed, "ceased")) if part]
        raise ValueError(
            f"{' and '.join(changes)} to train on this client and not on the others. All clients must train the same "
            "adapter or layers: freeze, unfreeze and add parameters before the trainer is built."
        )

    def _check_only_adapter_trains(self, model: Any) -> None:
        # PEFT keeps every tensor of an adapter in a dictionary keyed by the adapter's name, so that the name is one
        # part of the dotted path: `lora_A.default.weight`, `modules_to_save.default.bias`.
        adapters = set(model.active_adapters)
        outside = [name for name in self.parameters if adapters.isdisjoint(name.split("."))]
        if outside:
            raise ValueError(
                f"{len(outside)} parameters outside the adapter train but would not travel, for example "
                f"{outside[0]!r}. Freeze them, list their module in `modules_to_save`, or use exchange='trainable'."
            )

    def _find_buffers(self, model: nn.Module) -> tuple[list[str], list[str]]:
        """Names of buffers that travel, and of those that stay and are put back."""
        persistent = model.state_dict(keep_vars=True).keys()
        owners = {name.rpartition(".")[0] for name in self.parameters}
        travelling: list[str] = []
        staying: list[str] = []
        for name, _ in model.named_buffers():
            travels = self.kind == "all" or (self.kind == "trainable" and name.rpartition(".")[0] in owners)
            if travels and name in persistent:
                travelling.append(name)
            else:
                staying.append(name)
        return travelling, staying

    def read(self) -> dict[str, torch.Tensor]:
        """
        A copy of what travels.

        Returns:
            `dict[str, torch.Tensor]`: Values by name, on the model's device, without gradients.
        """
        return {name: tensor.clone() for name, tensor in self.live.items()}

    @torch.no_grad()
    def write(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Put values into the model, in one fused copy, and put back the buffers that stay.

        Args:
            state (`Mapping[str, torch.Tensor]`): A value for every name of this exchange, of the tensor's shape; dtype
                and device may differ.

        Raises:
            KeyError: If a name is missing. The message says which.
        """
        try:
            values = [state[name] for name in self.names]
        except KeyError as error:
            raise KeyError(f"The state lacks {error.args[0]!r}, which the model exchanges.") from None
        torch._foreach_copy_(self._live, values)
        if self._staying:
            staying = [self._model.get_buffer(name) for name in self._staying]
            torch._foreach_copy_(staying, list(self._staying.values()))

    def write_kept(self, state: Mapping[str, torch.Tensor], client_id: str) -> None:
        """
        Put back what a client kept of a model of its own, perhaps over the end of a process.

        Args:
            state (`Mapping[str, torch.Tensor]`): As [`~Exchange.read`] returned it.
            client_id (`str`): The client.

        Raises:
            AnotherModelError: If a name or a shape differs. The message says which.
        """
        there = {name: tuple(value.shape) for name, value in state.items()}
        here = {name: tuple(value.shape) for name, value in self.live.items()}
        if differs := sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name)):
            name = differs[0]
            raise AnotherModelError(
                f"What client {client_id!r} kept is of another model than it has now: {name!r} has the shape "
                f"{here.get(name)} here and {there.get(name)} there. Resume with the `clients` or the "
                "`client_model_init` that the checkpoint is of."
            )
        self.write(state)
