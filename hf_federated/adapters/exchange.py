"""Select the parameters and buffers to exchange with the server, and read and write them in one fused copy.

By default, the exchanged parameters are the trainable parameters. In a PEFT model, these are the parameters of the
active adapter and of `modules_to_save`, in their trainable form. Prompt-learning methods with a reparameterization
encoder (p-tuning, prefix tuning with `prefix_projection`) exchange the weights of the encoder, because the
materialized prompts from `get_peft_model_state_dict` cannot be trained further. The prompts are materialized when the
model is saved.

Training can also change buffers that are not exchanged. Every write restores these buffers. On a model that several
clients share in memory, the buffers of one client therefore never reach the next client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn


class ModelMismatchError(ValueError):
    """
    The saved state of a client does not match its current model.

    The error ends the run, because it is not the fault of a single client.
    """


class Exchange:
    """
    Read and write the exchanged parameters and buffers of one model.

    A parameter that two modules share (tied weights) has one name here and is exchanged once. The buffers of trainable
    modules are exchanged with them. Floating-point buffers are aggregated, integer buffers are copied.

    Args:
        model (`torch.nn.Module`):
            The model, which can be a `PeftModel`. After replacing parameters of the model, create a new `Exchange`.
        mode (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"trainable"`, `"adapter"` or `"all"`, as described in [`FederatedConfig`].

    Raises:
        ValueError: If there is nothing to exchange, if the mode is `"adapter"` and the model has no adapter, or if
            trainable parameters are outside the adapter and not exchanged.

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

    def __init__(self, model: nn.Module, mode: str = "auto") -> None:
        is_adapter = isinstance(model, PeftModel)
        if mode == "adapter" and not is_adapter:
            raise ValueError(
                f"exchange='adapter' needs a PEFT model, got {type(model).__name__}. Wrap it with "
                "`peft.get_peft_model`, or use exchange='trainable'."
            )
        self.kind = (
            "adapter" if mode == "adapter" or (mode == "auto" and is_adapter) else mode.replace("auto", "trainable")
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
                "No parameter of the model requires a gradient, so no client can train. Unfreeze parameters, or load "
                "the adapter with `is_trainable=True`."
            )
        self._trained = list(self.trainable)
        self._model = model
        self._buffers, local_buffers = self._find_buffers(model)
        self._local_buffers = {name: model.get_buffer(name).clone() for name in local_buffers}

    @property
    def names(self) -> list[str]:
        """Names of the exchanged parameters and buffers, in the order of the model."""
        return [*self.parameters, *self._buffers]

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """Exchanged tensors. Each call reads them again: a model moved to another device has new tensors."""
        buffers = [self._model.get_buffer(name).detach() for name in self._buffers]
        return [*(parameter.detach() for parameter in self.parameters.values()), *buffers]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Exchanged tensors by name, without gradients. They share memory with the model, so training changes them."""
        return dict(zip(self.names, self._tensors, strict=True))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The exchanged trainable parameters by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def num_values(self) -> int:
        """The number of scalars exchanged in one direction."""
        return sum(tensor.numel() for tensor in self._tensors)

    def check_unchanged(self, model: nn.Module) -> None:
        """
        Raise an error if training changed which parameters are trainable, and undo the change for the next client.

        Args:
            model (`torch.nn.Module`): The model of this exchange, after training.

        Raises:
            ValueError: If the trainable parameters changed. The message names a parameter.
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
            f"{' and '.join(changes)} to train on this client, but not on the other clients. All clients must train "
            "the same parameters. Freeze, unfreeze and add parameters before the trainer is built."
        )

    def _check_only_adapter_trains(self, model: Any) -> None:
        # PEFT stores the tensors of an adapter in dictionaries with the adapter name as key. The adapter name is
        # therefore one part of the dotted path: `lora_A.default.weight`, `modules_to_save.default.bias`.
        adapters = set(model.active_adapters)
        outside = [name for name in self.parameters if adapters.isdisjoint(name.split("."))]
        if outside:
            raise ValueError(
                f"{len(outside)} parameters outside the adapter are trainable but not exchanged, for example "
                f"{outside[0]!r}. Freeze them, list their module in `modules_to_save`, or use exchange='trainable'."
            )

    def _find_buffers(self, model: nn.Module) -> tuple[list[str], list[str]]:
        """Return the names of exchanged buffers, and the names of local buffers, which every write restores."""
        persistent = model.state_dict(keep_vars=True).keys()
        owners = {name.rpartition(".")[0] for name in self.parameters}
        exchanged: list[str] = []
        local: list[str] = []
        for name, _ in model.named_buffers():
            is_exchanged = self.kind == "all" or (self.kind == "trainable" and name.rpartition(".")[0] in owners)
            if is_exchanged and name in persistent:
                exchanged.append(name)
            else:
                local.append(name)
        return exchanged, local

    def read(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """
        Copy the exchanged parameters and buffers.

        Args:
            device (`torch.device`, *optional*): Device of the copies. Defaults to the model's device.

        Returns:
            `dict[str, torch.Tensor]`: Values by name, without gradients.
        """
        if device is None:
            return {name: tensor.clone() for name, tensor in self.tensors.items()}
        return {name: tensor.to(device, copy=True) for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def write(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Write values into the model in one fused copy, and restore the buffers that are not exchanged.

        Args:
            state (`Mapping[str, torch.Tensor]`): A value for each name of this exchange, with the shape of the tensor.
                Dtype and device can differ.

        Raises:
            KeyError: If a name is missing. The message contains the name.
        """
        try:
            values = [state[name] for name in self.names]
        except KeyError as error:
            raise KeyError(f"The state lacks {error.args[0]!r}, which the model exchanges.") from None
        torch._foreach_copy_(self._tensors, values)
        self._restore_local_buffers()

    def _restore_local_buffers(self) -> None:
        if self._local_buffers:
            local_buffers = [self._model.get_buffer(name) for name in self._local_buffers]
            torch._foreach_copy_(local_buffers, list(self._local_buffers.values()))

    @torch.no_grad()
    def share(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Write values into the model without a copy: the model then uses the memory of the state.

        The tensors that the model had before do not change, and training the model changes the state. Values with
        another dtype or on another device are converted, and the model has its own copy of these.

        Args:
            state (`Mapping[str, torch.Tensor]`): A value for each name of this exchange, with the shape of the tensor.
        """
        owners = [*self.parameters.values(), *(self._model.get_buffer(name) for name in self._buffers)]
        for name, owner in zip(self.names, owners, strict=True):
            owner.data = state[name].to(owner.device, owner.dtype)
        self._restore_local_buffers()

    def restore(self, state: Mapping[str, torch.Tensor], client_id: str) -> None:
        """
        Restore the saved state of a client's own model, for example after a restart of the process.

        Args:
            state (`Mapping[str, torch.Tensor]`): The state from [`~Exchange.read`].
            client_id (`str`): The client ID, for error messages.

        Raises:
            ModelMismatchError: If a name or a shape differs. The message contains the first name that differs.
        """
        saved = {name: tuple(value.shape) for name, value in state.items()}
        current = {name: tuple(value.shape) for name, value in self.tensors.items()}
        if differs := sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name)):
            name = differs[0]
            raise ModelMismatchError(
                f"The saved state of client {client_id!r} does not match its current model: {name!r} has the shape "
                f"{saved.get(name)} in the state and {current.get(name)} in the model. Resume with the `clients` or "
                "the `client_model_init` of the checkpoint."
            )
        self.write(state)
