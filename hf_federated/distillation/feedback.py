"""Derivatives of the server's validation loss with respect to the clients' predictions.

In FedID (Ma et al., FedID: Federated Interactive Distillation for Large-Scale Pretraining Language Models, EMNLP
2023), the server learns from the clients and computes its loss on labeled examples. The clients then learn from this
loss (equations 12 to 14). The loss depends on a client only through the predictions of the ensemble. For a server that
takes one step of gradient descent on a batch of `B` public examples,

    θ⁺ = θ − η ∇L_S(θ),   L_S(θ) = −(1/B) Σ_i Σ_c q_ic log p_ic(θ),   v = ∇L_val(θ⁺),

the chain rule gives the feedback for every row `i` and class `c`:

| the server averages | and minimizes | feedback | function |
|---|---|---|---|
| probabilities `q` | cross-entropy | `G_ic = ∂L_val/∂q_ic = (η/B) v·∇_θ log p_ic(θ)` | [`chain_rule_feedback`] |
| logits, `q` their softmax | cross-entropy | `q ⊙ (G − ⟨G, q⟩)`, row by row | [`logit_feedback`] |
| logits `t` | mean squared error | `∂L_val/∂t_ic = (2η/BC) v·∇_θ s_ic(θ)` | [`squared_error_feedback`] |

All derivatives are taken at the old `θ`, in the direction `v`. They need one forward pass in forward mode, and no
graph over the server's step. They are exact for this virtual step if its gradient was also computed in evaluation
mode. The server's real step with its optimizer is a different step. `Σ_c p_ic G_ic = 0` always holds, because
probabilities sum to 1.

`surrogates.py` has the losses with which clients use the feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import get_total_norm

from ..utils.arguments import require
from ..utils.weighted_mean import Tensors


ComputeLogits = Callable[[nn.Module, Any], torch.Tensor]
Method = Literal["jvp", "finite_difference"]


def model_logits(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """
    `model(**inputs)`, or its `.logits` if the result is not a tensor. One prediction for each row.

    Args:
        model (`torch.nn.Module`): A model of `transformers`, or a model that returns a tensor.
        inputs (`Mapping[str, Any]`): Keyword arguments of the model.
    """
    outputs = model(**inputs)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """
    Set a model to evaluation mode in the body of the `with` statement.

    Afterwards, every module has its previous mode again, also if the body raises an error.

    Args:
        model (`torch.nn.Module`): The model.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def loss_gradients(loss: torch.Tensor, parameters: Tensors) -> dict[str, torch.Tensor]:
    """
    The gradients of a loss by parameter name. `.grad` is not changed.

    Args:
        loss (`torch.Tensor`): A scalar with a graph.
        parameters (`Mapping[str, torch.Tensor]`): Parameters that require a gradient. A parameter that the loss does
            not use gets zeros.
    """
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


@contextmanager
def virtual_step(parameters: Tensors, gradients: Tensors, step_size: float) -> Iterator[None]:
    """
    Set the parameters to `θ − η g` in the body of the `with` statement, in place.

    Afterwards, the parameters are `θ` again, bit for bit, also if the body raises an error. The body must also
    differentiate its results: a backward pass after the body raises an error, because the values have changed. A copy
    of the parameters is kept in the meantime.

    Args:
        parameters (`Mapping[str, torch.Tensor]`): `θ` by name.
        gradients (`Mapping[str, torch.Tensor]`): `g` by name. Parameters without a gradient are not changed.
        step_size (`float`): `η`. In a narrow dtype, a small step may round to 0.

    Raises:
        ValueError: If a gradient has no parameter or a different shape.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import loss_gradients, virtual_step

    >>> parameters = {"w": torch.ones(2, requires_grad=True)}
    >>> with virtual_step(parameters, {"w": torch.tensor([1.0, 2.0])}, step_size=0.5):
    ...     loss_gradients(parameters["w"].square().sum(), parameters)
    {'w': tensor([1., 0.])}
    >>> parameters["w"]
    tensor([1., 1.], requires_grad=True)
    ```
    """
    _check_names(gradients, parameters)
    before = {name: parameters[name].detach().clone() for name in gradients}
    try:
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameters[name].sub_(gradient, alpha=step_size)
        # An enclosing autocast caches narrow copies of the old parameters.
        torch.clear_autocast_cache()
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                parameters[name].copy_(value)
        torch.clear_autocast_cache()


def directional_derivative(
    model: nn.Module,
    inputs: Any,
    direction: Tensors,
    *,
    of: Literal["log_probabilities", "logits"] = "log_probabilities",
    method: Method = "jvp",
    compute_logits: ComputeLogits = model_logits,
) -> torch.Tensor:
    """
    `v·∇_θ log p_ic(θ)` for every row and class, in evaluation mode. The model is not changed.

    `"jvp"` is exact. It is one forward pass in forward mode. Attention uses torch's math kernel, because the fused
    kernels have no forward derivative.

    `"finite_difference"` is for models with an operation without a forward derivative. It is two forward passes,
    `(f(θ + εv) − f(θ − εv)) / 2ε`. Its step has the length `‖εv‖ = (u · max(1, ‖θ‖))^(1/3)`, where `u` is the spacing
    of the parameters' dtype at 1, and the norms are over the parameters in `v`. This length balances the error of
    curvature, about `‖εv‖²` of the result, against the error of rounding, about `u · max(1, ‖θ‖) / ‖εv‖`. If the model
    computes in a narrower dtype than its parameters, for example under autocast, the rounding error is much larger.
    Use `"jvp"` then.

    Args:
        model (`torch.nn.Module`): The model at `θ`.
        inputs (`Any`): Inputs of `compute_logits`, usually a batch.
        direction (`Mapping[str, torch.Tensor]`): `v`, by the names of `model.named_parameters()`. Other parameters
            have the direction 0.
        of (`str`, *optional*, defaults to `"log_probabilities"`): `"log_probabilities"` or `"logits"`.
        method (`str`, *optional*, defaults to `"jvp"`): `"jvp"` or `"finite_difference"`.
        compute_logits (`Callable`, *optional*):
            `(model, inputs) -> logits of shape (N, C)`. For token prediction, it selects the positions.

    Returns:
        `torch.Tensor` of shape `(N, C)`: The derivative without a graph, in float32 or wider.

    Raises:
        NotImplementedError: If the model has an operation without a forward derivative (`"jvp"`).
        ValueError: If `direction` has an unknown name or a wrong shape, the logits have a wrong shape, an option is
            unknown, or the parameters are in half precision (`"finite_difference"`).
    """
    require("of", of, of in ("log_probabilities", "logits"), "'log_probabilities' or 'logits'")
    require("method", method, method in ("jvp", "finite_difference"), "'jvp' or 'finite_difference'")
    parameters = dict(model.named_parameters())
    _check_names(direction, parameters)

    def outputs(model: nn.Module, inputs: Any) -> torch.Tensor:
        logits = compute_logits(model, inputs)
        if logits.ndim != 2:
            raise ValueError(
                f"The logits have shape {tuple(logits.shape)}; expected (N, C), one row for each prediction. Select "
                "the positions in `compute_logits`."
            )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.log_softmax(dim=-1) if of == "log_probabilities" else logits

    with evaluation_mode(model), torch.no_grad():
        if method == "jvp":
            return _forward_derivative(model, inputs, direction, outputs)
        moved = {name: parameters[name] for name in direction}
        return _central_difference(moved, direction, lambda: outputs(model, inputs))


class _Outputs(nn.Module):
    """A function of a model as a module. `functional_call` can replace the model's parameters in it."""

    def __init__(self, model: nn.Module, function: ComputeLogits) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.function(self.model, inputs)


def _forward_derivative(model: nn.Module, inputs: Any, direction: Tensors, function: ComputeLogits) -> torch.Tensor:
    parameters = dict(model.named_parameters())
    # Not `torch.func.jvp`: its transforms forbid `requires_grad_` in hooks. Gradient checkpointing in transformers has
    # such hooks.
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        duals = {
            f"model.{name}": forward_ad.make_dual(parameters[name].detach(), tangent.to(parameters[name]))
            for name, tangent in direction.items()
        }
        try:
            outputs = torch.func.functional_call(_Outputs(model, function), duals, (inputs,))
        except NotImplementedError as error:
            raise NotImplementedError(
                "The model has an operation without a forward derivative, which `method='jvp'` needs: "
                f"{str(error).splitlines()[0]} If the operation is attention, load the model with "
                "`attn_implementation='sdpa'` or 'eager'. Otherwise, use `method='finite_difference'`."
            ) from error
        primal, tangent = forward_ad.unpack_dual(outputs)
        return torch.zeros_like(primal) if tangent is None else tangent.clone()


def _central_difference(parameters: Tensors, direction: Tensors, function: Callable[[], torch.Tensor]) -> torch.Tensor:
    if narrow := [name for name, parameter in parameters.items() if parameter.dtype.itemsize < 4]:
        raise ValueError(
            f"{narrow[0]!r} is {parameters[narrow[0]].dtype}, which is too narrow for a small difference. Set "
            "`method='jvp'`, or keep the parameters in float32."
        )
    length = float(get_total_norm(direction.values()))
    if length == 0:
        return torch.zeros_like(function())
    spacing = max(torch.finfo(parameter.dtype).eps for parameter in parameters.values())
    size = float(get_total_norm([parameter.detach() for parameter in parameters.values()]))
    step = (spacing * max(1.0, size)) ** (1 / 3) / length
    with virtual_step(parameters, direction, -step):
        above = function()
    with virtual_step(parameters, direction, step):
        below = function()
    return (above - below) / (2 * step)


def chain_rule_feedback(
    model: nn.Module,
    inputs: Any,
    validation_gradients: Tensors,
    step_size: float,
    *,
    method: Method = "jvp",
    compute_logits: ComputeLogits = model_logits,
) -> torch.Tensor:
    """
    `G_ic = ∂L_val(θ⁺)/∂q_ic = (η/B) v·∇_θ log p_ic(θ)`, the first row of the module's table.

    Args:
        model (`torch.nn.Module`): The server's model at the old `θ`.
        inputs (`Any`): The public batch of the step.
        validation_gradients (`Mapping[str, torch.Tensor]`): `v`, computed inside [`virtual_step`].
        step_size (`float`): `η`, the step size of [`virtual_step`]. Another number scales `G`.
        method (`str`, *optional*, defaults to `"jvp"`): As in [`directional_derivative`].
        compute_logits (`Callable`, *optional*): As in [`directional_derivative`]. Its number of rows `N` is `B`.

    Returns:
        `torch.Tensor` of shape `(B, C)`: `G`.

    Raises:
        NotImplementedError: As in [`directional_derivative`].
        ValueError: As in [`directional_derivative`].

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import (
    ...     chain_rule_feedback, evaluation_mode, loss_gradients, soft_cross_entropy, virtual_step
    ... )

    >>> model = torch.nn.Linear(4, 2)
    >>> public, rows, labels = {"input": torch.randn(3, 4)}, torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
    >>> ensemble = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]])
    >>> parameters = dict(model.named_parameters())
    >>> with evaluation_mode(model):
    ...     gradients = loss_gradients(soft_cross_entropy(model(**public), ensemble), parameters)
    ...     with virtual_step(parameters, gradients, step_size=0.1):
    ...         loss = torch.nn.functional.cross_entropy(model(rows), labels)
    ...         validation_gradients = loss_gradients(loss, parameters)
    >>> chain_rule_feedback(model, public, validation_gradients, step_size=0.1).shape
    torch.Size([3, 2])
    ```
    """
    derivative = directional_derivative(
        model, inputs, validation_gradients, of="log_probabilities", method=method, compute_logits=compute_logits
    )
    return derivative * (step_size / max(1, len(derivative)))


def logit_feedback(ensemble_probabilities: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
    """
    Feedback for averaged logits: `q ⊙ (G − ⟨G, q⟩)`, where `q` is the softmax of the mean logits.

    Args:
        ensemble_probabilities (`torch.Tensor` of shape `(B, C)`): `q`.
        feedback (`torch.Tensor` of shape `(B, C)`): `G`, from [`chain_rule_feedback`].

    Returns:
        `torch.Tensor` of shape `(B, C)`: The feedback. Each row sums to 0.
    """
    expected = (ensemble_probabilities * feedback).sum(dim=-1, keepdim=True)
    return ensemble_probabilities * (feedback - expected)


def squared_error_feedback(
    model: nn.Module,
    inputs: Any,
    validation_gradients: Tensors,
    step_size: float,
    *,
    method: Method = "jvp",
    compute_logits: ComputeLogits = model_logits,
) -> torch.Tensor:
    """
    Feedback for averaged logits `t` and a squared error: `∂L_val(θ⁺)/∂t_ic = (2η/BC) v·∇_θ s_ic(θ)`.

    This is the last row of the module's table. The server fits `t` by [`mean_squared_error`] without centering.

    Args:
        model (`torch.nn.Module`): As in [`chain_rule_feedback`].
        inputs (`Any`): As in [`chain_rule_feedback`].
        validation_gradients (`Mapping[str, torch.Tensor]`): As in [`chain_rule_feedback`].
        step_size (`float`): As in [`chain_rule_feedback`].
        method (`str`, *optional*, defaults to `"jvp"`): As in [`directional_derivative`].
        compute_logits (`Callable`, *optional*): As in [`directional_derivative`].

    Returns:
        `torch.Tensor` of shape `(B, C)`: The feedback.

    Raises:
        NotImplementedError: As in [`directional_derivative`].
        ValueError: As in [`directional_derivative`].
    """
    derivative = directional_derivative(
        model, inputs, validation_gradients, of="logits", method=method, compute_logits=compute_logits
    )
    return derivative * (2 * step_size / max(1, derivative.numel()))


def _check_names(values: Tensors, parameters: Tensors) -> None:
    for name, value in values.items():
        if name not in parameters:
            raise ValueError(
                f"{name!r} is not the name of one of the {len(parameters)} parameters. Use the model's own names."
            )
        if value.shape != parameters[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(value.shape)}, but the parameter has shape "
                f"{tuple(parameters[name].shape)}. Pass a tensor with the shape of the parameter."
            )
