"""Select the parameters and buffers to exchange with the server, and read and write them in one fused copy.

By default, the exchanged parameters are the trainable parameters. In a PEFT model, these are the parameters of the
active adapter and of `modules_to_save`, in their trainable form. Prompt-learning methods with a reparameterization
encoder (p-tuning, prefix tuning with `prefix_projection`) exchange the weights of the encoder, because the
materialized prompts from `get_peft_model_state_dict` cannot be trained further. The prompts are materialized when the
model is saved.

Clients can train further parameters and buffers that stay with them (`keep_local`). Training can also change buffers
that are neither exchanged nor local. Every write restores both. On a model that several clients share in memory, the
values of one client therefore never reach the next client.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from .._compat import trained_layout
from ..config import EXCHANGES, HEAD
from ..messages.narrowed_state import NarrowedState
from ..utils.lora_modules import find_lora_modules
from ..utils.selection import Selection, select
from .residual import ResidualAdapter, needs_residual
from .shards import ShardedTensors, free_unsharded, values_here


_shape_of, _dtype_of = operator.attrgetter("shape"), operator.attrgetter("dtype")


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
        mode (`str`, `Sequence[str]` or `Callable`, *optional*, defaults to `"auto"`):
            The exchanged tensors, as `exchange` of [`FederatedConfig`].
        keep_local (`str`, `Sequence[str]` or `Callable`, *optional*):
            The local tensors, as `keep_local` of [`FederatedConfig`].
        with_base (`bool`, *optional*, defaults to `False`):
            Whether the base weights of LoRA modules are exchanged too, for a method that changes them. If they cannot
            be written, the model gets a residual adapter, whose factors are exchanged instead.

    Attributes:
        kind (`str`): `"adapter"`, `"trainable"`, `"all"`, or `"selected"` for patterns and functions.
        parameters (`dict[str, torch.nn.Parameter]`): The exchanged parameters by name.
        local_parameters (`dict[str, torch.nn.Parameter]`): The trainable local parameters by name.
        base_parameters (`dict[str, torch.nn.Parameter]`): The base weights of LoRA modules, or the factors of the
            residual adapter, by name. Empty unless `with_base` is set.
        initial_base (`dict[str, torch.Tensor]`): Copies of `base_parameters` before any client trained.
        residual ([`~hf_federated.adapters.residual.ResidualAdapter`], *optional*): The residual adapter.
        has_local (`bool`): Whether there are local parameters or buffers.
        shards ([`~hf_federated.adapters.shards.ShardedTensors`]): The parameters that FSDP2 divides over processes.
            [`~Exchange.read`] and [`~Exchange.write`] then read and write the shards of this process.

    Raises:
        ValueError: If there is nothing to exchange, if the mode is `"adapter"` and the model has no adapter, if a
            pattern matches no tensor, or if trainable parameters are neither exchanged nor local.

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
    >>> Exchange(model, keep_local="bias").names
    ['weight']
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Selection = "auto",
        keep_local: Selection | None = None,
        with_base: bool = False,
    ) -> None:
        self.kind = _kind_of(model, mode)
        self._model = model
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        # Training must not change which parameters these are.
        self._trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        # The layout of a model that was found unchanged.
        self._layout: list[Any] | None = None
        saved = model.state_dict(keep_vars=True).keys()
        persistent = {name: buffer for name, buffer in buffers.items() if name in saved}
        candidates = self._candidates(parameters, persistent)
        if self.kind == "selected":
            tensors = {**self._trained, **buffers}
            candidates = select("exchange", mode, {name: tensors[name] for name in candidates})
        local: list[str] = []
        if keep_local == HEAD:
            local = _head(model, self._trained)
        elif keep_local is not None:
            local = select("keep_local", keep_local, {**self._trained, **persistent})
        kept = set(local)
        exchanged = [name for name in candidates if name not in kept]
        self.parameters: dict[str, nn.Parameter] = {name: parameters[name] for name in exchanged if name in parameters}
        self.residual = ResidualAdapter(model) if with_base and needs_residual(model) else None
        base = [module.base for module in find_lora_modules(model).values()] if with_base else []
        self.base_parameters: dict[str, nn.Parameter] = (
            {name: parameters[name] for name in base} if self.residual is None else self.residual.parameters
        )
        self.initial_base = {name: value.detach().clone() for name, value in self.base_parameters.items()}
        self.parameters |= self.base_parameters
        self.local_parameters = {name: self._trained[name] for name in local if name in self._trained}
        self._buffers = [name for name in exchanged if name in buffers]
        self._local_buffers = [name for name in local if name in buffers]
        self.has_local = bool(local)
        self._check_all_trained(model)
        # The initial values of the local tensors, and of the buffers that are neither exchanged nor local.
        self._restored_buffers = [name for name in buffers if name not in self._buffers]
        restored = {**self.local_parameters, **{name: buffers[name] for name in self._restored_buffers}}
        self._initial = {name: values_here(tensor).clone() for name, tensor in restored.items()}
        self.shards = ShardedTensors(self.parameters)
        self._check_sharded(buffers)

    def _candidates(self, parameters: Iterable[str], persistent: Iterable[str]) -> list[str]:
        """Return the names of the parameters and buffers that are exchanged if they are not local."""
        if self.kind == "all":
            return [*parameters, *persistent]
        owners = {name.rpartition(".")[0] for name in self._trained} if self.kind != "adapter" else set()
        return [*self._trained, *(name for name in persistent if name.rpartition(".")[0] in owners)]

    def _check_all_trained(self, model: nn.Module) -> None:
        """Check that there are exchanged trainable parameters, and that all others are local."""
        left_out = [
            name for name in self._trained if name not in self.parameters and name not in self.local_parameters
        ]
        if left_out:
            raise ValueError(
                f"{len(left_out)} trainable parameters are not selected by `exchange`, for example {left_out[0]!r}. "
                "Select them with `exchange`, keep them on the clients with `keep_local`, or freeze them."
            )
        if self.kind == "adapter":
            self._check_only_adapter_trains(model)
        if self._trained and not self.trainable:
            raise ValueError(
                f"`keep_local` selects all {len(self._trained)} trainable parameters, so nothing is left to exchange. "
                "Select fewer of them, or use aggregation='local_only'."
            )
        if not self.trainable:
            raise ValueError(
                "No parameter of the model requires a gradient, so no client can train. Unfreeze parameters, or load "
                "the adapter with `is_trainable=True`."
            )

    def _check_sharded(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Check that FSDP2, if it divides the parameters over processes, divides all that clients change."""
        if not self.shards.shapes:
            return
        whole = [name for name in self.parameters if name not in self.shards.shapes]
        whole += [name for name in (*self._buffers, *self._local_buffers) if buffers[name].is_floating_point()]
        if whole:
            raise ValueError(
                f"{whole[0]!r} is not sharded by FSDP2, so each process would have other values. Leave it out of the "
                "exchanged and local tensors, remove its module from `ignored_modules` of the FSDP plugin, or launch "
                "with plain data parallelism."
            )

    @property
    def names(self) -> list[str]:
        """Names of the exchanged parameters and buffers, in the order of the model."""
        return [*self.parameters, *self._buffers]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Exchanged tensors by name, without gradients. They share memory with the model, so training changes them."""
        return self._detached(self.parameters, self._buffers)

    @property
    def tensors_with_gradients(self) -> dict[str, torch.Tensor]:
        """As `tensors`, with the parameters themselves, for a caller that needs no values or disables gradients."""
        if self.shards.shapes:
            return self.tensors
        tensors: dict[str, torch.Tensor] = dict(self.parameters)
        for name in self._buffers:
            tensors[name] = self._model.get_buffer(name)
        return tensors

    def has_layout(self, state: Mapping[str, Any]) -> bool:
        """Whether a state has the names, shapes and dtypes of the exchanged tensors, in their order."""
        own = self.tensors_with_gradients
        # No Python code runs for a tensor.
        return (
            list(state) == list(own)
            and list(map(_shape_of, state.values())) == list(map(_shape_of, own.values()))
            and list(map(_dtype_of, state.values())) == list(map(_dtype_of, own.values()))
        )

    def _detached(self, parameters: Mapping[str, nn.Parameter], buffers: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return tensors by name, read again: a model moved to another device has new tensors."""
        tensors: dict[str, torch.Tensor] = dict(parameters)
        for name in buffers:
            tensors[name] = self._model.get_buffer(name)
        if not self.shards.shapes:
            return {name: tensor.detach() for name, tensor in tensors.items()}
        return {name: values_here(tensor) for name, tensor in tensors.items()}

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The exchanged trainable parameters by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def num_values(self) -> int:
        """The number of scalars exchanged in one direction, without base weights of LoRA modules."""
        return sum(tensor.numel() for name, tensor in self.tensors.items() if name not in self.base_parameters)

    @property
    def max_values(self) -> int:
        """The largest number of scalars in a state. The rank of a residual adapter grows."""
        if self.residual is None:
            return sum(tensor.numel() for tensor in self.tensors.values())
        return self.num_values + self.residual.max_values

    def follow(self, other: Exchange) -> None:
        """Read and write the tensors of another exchange. The tensors of a model before its sharding can be freed."""
        vars(self).update(vars(other))

    def check_unchanged(self, model: nn.Module) -> None:
        """
        Raise an error if training changed which parameters are trainable, and undo the change for the next client.

        Args:
            model (`torch.nn.Module`): The model of this exchange, after training.

        Raises:
            ValueError: If the trainable parameters changed. The message names a parameter.
        """
        # A class may have its own list of parameters.
        is_plain = type(model).named_parameters is nn.Module.named_parameters
        layout = trained_layout(model) if is_plain else None
        if layout is not None and layout == self._layout:
            return
        expected = self._trained
        now = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if now.keys() == expected.keys():
            self._layout = layout
            return
        added = [name for name in now if name not in expected]
        removed = [name for name in expected if name not in now]
        for name, parameter in {**now, **expected}.items():
            parameter.requires_grad_(name in expected)
        changes = [f"{part[0]!r} {verb}" for part, verb in ((added, "began"), (removed, "ceased")) if part]
        raise ValueError(
            f"{' and '.join(changes)} to train on this client, but not on the other clients. All clients must train "
            "the same parameters. Freeze, unfreeze and add parameters before the trainer is built."
        )

    def _check_only_adapter_trains(self, model: Any) -> None:
        # PEFT stores the tensors of an adapter in dictionaries with the adapter name as key. The adapter name is
        # therefore one part of the dotted path: `lora_A.default.weight`, `modules_to_save.default.bias`.
        adapters = set(model.active_adapters)
        others = (name for name in self.parameters if name not in self.base_parameters)
        outside = [name for name in others if adapters.isdisjoint(name.split("."))]
        if outside:
            raise ValueError(
                f"{len(outside)} parameters outside the adapter are trainable but not exchanged, for example "
                f"{outside[0]!r}. Freeze them, list their module in `modules_to_save`, keep them on the clients with "
                "`keep_local`, or use exchange='trainable'."
            )

    @property
    def _local(self) -> dict[str, torch.Tensor]:
        """The local parameters and buffers by name."""
        return self._detached(self.local_parameters, self._local_buffers)

    @property
    def num_local_values(self) -> int:
        """The number of scalars that a client trains and keeps."""
        return sum(tensor.numel() for tensor in self._local.values())

    @property
    def local_names(self) -> list[str]:
        """Names of the local parameters and buffers, in the order of the model."""
        return [*self.local_parameters, *self._local_buffers]

    @property
    def initial_local(self) -> dict[str, torch.Tensor]:
        """Values of the local tensors before any client trained. Every write restores them."""
        return {name: self._initial[name] for name in self.local_names}

    def read_local(self) -> dict[str, torch.Tensor]:
        """Copy the local parameters and buffers, which a client keeps."""
        return {name: tensor.clone() for name, tensor in self._local.items()} if self.has_local else {}

    def write_local(self, state: Mapping[str, torch.Tensor] | None, client_id: str) -> None:
        """
        Write the local tensors of a client into the model.

        Args:
            state (`Mapping[str, torch.Tensor]`, *optional*): The state from [`~Exchange.read_local`]. Defaults to
                `initial_local`.
            client_id (`str`): The client ID, for error messages.

        Raises:
            ModelMismatchError: If a name or a shape differs. The message contains the first name that differs.
        """
        if not self.has_local:
            return
        tensors = self._local
        if state is None:
            state = self._initial
        else:
            _check_saved(state, tensors, client_id)
        with torch.no_grad():
            torch._foreach_copy_(list(tensors.values()), [state[name] for name in tensors])

    def load_initial_local(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace `initial_local` by the values of a checkpoint, and write them into the model."""
        self._initial |= {name: value.to(self._initial[name]) for name, value in state.items()}
        self.write_local(None, "")

    @torch.no_grad()
    def read(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """
        Copy the exchanged parameters and buffers.

        Args:
            device (`torch.device`, *optional*): Device of the copies. Defaults to the model's device.

        Returns:
            `dict[str, torch.Tensor]`: Values by name, without gradients.
        """
        tensors = self.tensors_with_gradients.items()
        if device is None:
            return {name: tensor.clone() for name, tensor in tensors}
        return {name: tensor.detach().to(device, copy=True) for name, tensor in tensors}

    @torch.no_grad()
    def write(self, state: Mapping[str, torch.Tensor]) -> None:
        """
        Write values into the model in one fused copy, and restore the local tensors and the other buffers.

        Args:
            state (`Mapping[str, torch.Tensor]`): A value for each name of this exchange, with the shape of the tensor.
                Dtype and device can differ.

        Raises:
            KeyError: If a name is missing. The message contains the name.
        """
        try:
            if self.residual is not None:
                self.residual.resize(state)
            tensors = self.tensors_with_gradients
            if isinstance(state, NarrowedState):
                # One converted tensor at a time is in memory.
                for name, tensor in tensors.items():
                    tensor.copy_(state[name])
            else:
                torch._foreach_copy_(list(tensors.values()), [state[name] for name in tensors])
        except KeyError as error:
            raise KeyError(f"The state lacks {error.args[0]!r}, which the model exchanges.") from None
        self._restore()
        if self.shards.shapes:
            free_unsharded(self._model)

    def _restore(self) -> None:
        if self._initial:
            buffers = [self._model.get_buffer(name) for name in self._restored_buffers]
            restored: list[torch.Tensor] = [*self.local_parameters.values(), *buffers]
            if self.shards.shapes:
                restored = [values_here(tensor) for tensor in restored]
            torch._foreach_copy_(restored, list(self._initial.values()))

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
        self._restore()

    def restore(self, state: Mapping[str, torch.Tensor], client_id: str) -> None:
        """
        Restore the saved state of a client's own model, for example after a restart of the process.

        Args:
            state (`Mapping[str, torch.Tensor]`): The state from [`~Exchange.read`].
            client_id (`str`): The client ID, for error messages.

        Raises:
            ModelMismatchError: If a name or a shape differs. The message contains the first name that differs.
        """
        _check_saved(state, self.tensors, client_id)
        self.write(state)


def _kind_of(model: nn.Module, mode: Selection) -> str:
    """Return the kind of an exchange."""
    if not isinstance(mode, str) or mode not in EXCHANGES:
        return "selected"
    is_adapter = isinstance(model, PeftModel)
    if mode == "adapter" and not is_adapter:
        raise ValueError(
            f"exchange='adapter' needs a PEFT model, got {type(model).__name__}. Wrap it with "
            "`peft.get_peft_model`, or use exchange='trainable'."
        )
    return ("adapter" if is_adapter else "trainable") if mode == "auto" else mode


def _head(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of the trainable parameters that a model adds to its base model or to its adapter."""
    if isinstance(model, PeftModel):
        place = "in `modules_to_save`"
        head = [name for name in trained if ".modules_to_save." in f".{name}"]
    elif isinstance(model, PreTrainedModel):
        place = f"outside its base model {model.base_model_prefix!r}"
        inside = {id(parameter) for parameter in model.base_model.parameters()}
        head = [name for name, parameter in trained.items() if id(parameter) not in inside]
    else:
        raise ValueError(
            f"keep_local='head' needs a transformers or PEFT model, got {type(model).__name__}. Set `keep_local` to a "
            "pattern such as 'classifier*'."
        )
    if not head:
        raise ValueError(
            f"keep_local='head', but {type(model).__name__} has no trainable parameter {place}. Set `keep_local` to a "
            f"pattern of its names, such as {next(iter(trained), '')!r}."
        )
    return head


def _check_saved(state: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], client_id: str) -> None:
    """Raise an error if the saved state of a client has other names or shapes than the tensors of its model."""
    saved = {name: tuple(value.shape) for name, value in state.items()}
    current = {name: tuple(value.shape) for name, value in tensors.items()}
    if differs := sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name)):
        name = differs[0]
        raise ModelMismatchError(
            f"The saved state of client {client_id!r} does not match its current model: {name!r} has the shape "
            f"{saved.get(name)} in the state and {current.get(name)} in the model. Resume with the `clients` or "
            "the `client_model_init` of the checkpoint."
        )
