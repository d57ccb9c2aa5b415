"""`ClientPart`: the client half of a method, and `ClientContext`, the client that it sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from ..messages import ClientUpdate, Fit, Message


@dataclass
class ClientContext:
    """
    A client, as the client half of a method sees it.

    Args:
        client_id (`str`): Id of the client.
        model ([`~hf_federated.clients.ClientModel`]): The client's model and its trainer.
        seed (`int`): Seed of the federation.
        memory (`dict[str, Any]`, *optional*): Scalars and tensors that this half keeps on the client between messages
            and rounds. A half changes the memory by assigning new values to its keys. The memory is saved with the
            client's other state and resumed with it. It is not kept if the message fails.
        open_dataset (`Callable[[], Dataset]`, *optional*): Opens the client's encoded training examples.
        open_private_model (`Callable`, *optional*): Builds the trainer of the client's private model and its
            [`~hf_federated.adapters.Exchange`], if the method trains private models. The model is in its state before
            the first round.
        trainer (`transformers.Trainer`, *optional*): The trainer of the local training, while it runs and in
            [`~ClientPart.send`].
        peft_config (`peft.LoraConfig`, *optional*): The LoRA configuration of the client, if it differs from that of
            the model.
    """

    client_id: str
    model: Any
    seed: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    open_dataset: Callable[[], Any] = field(default_factory=lambda: lambda: None)
    open_private_model: Callable[[], tuple[Trainer, Any]] | None = None
    trainer: Trainer | None = None
    peft_config: Any = None

    @property
    def student(self) -> Any:
        """
        The client's model on the public examples, a [`~hf_federated.clients.Student`].

        Raises:
            TypeError: If there are no public examples.
        """
        if self.model.student is None:
            raise TypeError("This client has no public examples: pass `public_dataset` to the trainer.")
        return self.model.student

    @property
    def local_trainer(self) -> Trainer:
        """
        The trainer of the local training.

        Raises:
            RuntimeError: If no local training runs.
        """
        if self.trainer is None:
            raise RuntimeError("No local training runs. Use the trainer in the methods of a local training only.")
        return self.trainer


class ClientPart:
    """
    Client half of a method. It answers the messages of the server half.

    The client creates one part for each message. A part uses the constructor arguments of the method, the message and
    the client of `context`, because a client can run on another machine. What a part needs in a later message is in
    `context.memory`.

    Args:
        context ([`ClientContext`]): The client.
        method ([`Method`], *optional*): The method on the client. It has the constructor arguments of the server's
            method, but not its state.

    Attributes:
        callbacks (`Sequence[TrainerCallback]`): Callbacks that run inside the local training.
        frozen (`Sequence[torch.nn.Parameter]`): Exchanged parameters that the local training does not change.

    Example:

    ```python
    >>> from hf_federated import ClientPart

    >>> class WithoutBiases(ClientPart):
    ...     def on_gradients(self, parameters):
    ...         for name, parameter in parameters.items():
    ...             if name.endswith("bias"):
    ...                 parameter.grad = None
    ```
    """

    callbacks: Sequence[TrainerCallback] = ()
    frozen: Sequence[nn.Parameter] = ()

    def __init__(self, context: ClientContext, method: Any = None) -> None:
        self.context = context
        self.method = method

    @property
    def memory(self) -> dict[str, Any]:
        """The memory of this half on the client."""
        return self.context.memory

    @property
    def changes_loss(self) -> bool:
        """Whether the subclass overrides `inputs` or `loss`."""
        return type(self).inputs is not ClientPart.inputs or type(self).loss is not ClientPart.loss

    @property
    def changes_gradients(self) -> bool:
        """Whether the part uses the gradients of this local training."""
        return type(self).on_gradients is not ClientPart.on_gradients or type(self).on_step is not ClientPart.on_step

    def receive(self, message: Fit) -> None:
        """
        Called before the state of the message is written into the client's model and before local training.

        Args:
            message ([`Fit`]): Message from the server.

        Raises:
            ValueError: If the server half does not send such a message, for example because a tensor is missing. The
                client then refuses the request.
        """

    def place(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        Return the values that are written into the client's model.

        A part whose server half sends other names or shapes (`state_for`) returns a value for each exchanged tensor.

        Args:
            state (`dict[str, torch.Tensor]`): The state of the message.
        """
        return state

    def close(self) -> None:
        """Called after the local training, also after an error. Undo changes of objects that clients share."""

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the model for a batch of a training step."""
        return dict(inputs)

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """
        Compute the loss of a training step.

        Args:
            loss (`torch.Tensor`): Loss of the trainer, as the mean over this batch.
            outputs (`Any`): Outputs of the model, by name.
            inputs (`Mapping[str, Any]`): Inputs of the model, from [`~ClientPart.inputs`].

        Returns:
            `torch.Tensor`: Loss on the same scale as `loss`. With gradient accumulation, it gets the same weight as
            the loss of the trainer.
        """
        return loss

    def on_batch(self, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> None:
        """
        Called before the loss of a micro-batch is computed.

        Args:
            model (`torch.nn.Module`): The model of the training step.
            inputs (`Mapping[str, Any]`): The micro-batch.
            num_items (`torch.Tensor` or `int`, *optional*): Number of items in all micro-batches of the step.
        """

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """
        Called before each optimizer step and before gradient clipping.

        The gradients of the whole accumulated batch are in `.grad`. With `fp16=True`, they are divided by the loss
        scale, and the method is not called for a step whose gradients overflow, because the optimizer skips this step.

        Args:
            parameters (`Mapping[str, torch.nn.Parameter]`): The trained parameters that are exchanged, by name. The
                message has a value for each of them. They do not include the parameters that the client keeps
                (`keep_local` of [`FederatedConfig`]).
        """

    def on_step(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """
        Called before each optimizer step, after [`~ClientPart.on_gradients`] and under the same conditions.

        Args:
            param_groups (`Sequence[Mapping[str, Any]]`): Parameter groups of the optimizer. `"lr"` is the learning
                rate of this step.
        """

    def send(self, update: ClientUpdate) -> ClientUpdate:
        """
        Called after local training.

        Args:
            update ([`ClientUpdate`]): The result of the local training, with the additional tensors and metrics that
                preceding parts added.

        Returns:
            [`ClientUpdate`]: The update. A part can add tensors (`extra`) and metrics, and change the trained state.
        """
        return update

    def answer(self, message: Message) -> Message:
        """
        Answer a message of one of the kinds in `messages` of the method.

        Args:
            message ([`Message`]): Message from the server.

        Returns:
            [`Message`]: The reply, without a nonce.
        """
        raise TypeError(f"{type(self).__name__} does not answer the message {type(message).__name__}.")
