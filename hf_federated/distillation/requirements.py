"""Requirements of a distillation method, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Requirements:
    """
    Requirements of a method. The trainer checks them when it is built.

    Args:
        public_dataset (`bool`, *optional*, defaults to `True`): The server and the clients have the same unlabeled
            examples.
        server_dataset (`bool`, *optional*, defaults to `False`): The server has labeled examples.
        client_evaluation (`bool`, *optional*, defaults to `False`): Clients have evaluation examples.
        class_probabilities (`bool`, *optional*, defaults to `True`): Predictions are distributions over classes,
            exactly one of which is correct.
        initial_model (`bool`, *optional*, defaults to `False`): Clients use the model as it was before the first
            round, and read all their examples with it.
        unscaled_gradients (`bool`, *optional*, defaults to `False`): The method computes gradients outside of training
            steps. In float16 they would become zero, so the method does not support `fp16=True`.
        forward_derivatives (`bool`, *optional*, defaults to `False`): The method computes derivatives of the server's
            model in forward mode, which the layers of a quantized model do not have.

    Example:

    ```python
    >>> from hf_federated.distillation import DSFL

    >>> DSFL().requirements.public_dataset
    True
    ```
    """

    public_dataset: bool = True
    server_dataset: bool = False
    client_evaluation: bool = False
    class_probabilities: bool = True
    initial_model: bool = False
    unscaled_gradients: bool = False
    forward_derivatives: bool = False
