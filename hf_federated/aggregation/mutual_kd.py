"""MutualKD: each client trains a private large model and a shared small model, which teach each other."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .._compat import attention_implementation
from ..distillation.losses import kl_divergence
from ..distillation.low_rank import compress, decompress, energy_schedule
from ..messages import ClientUpdate, Disclosure, Fit
from ..messages.validation import InvalidUpdateError
from ..methods import Accumulator, ClientPart
from ..postprocessing import Memory, Postprocessor
from ..utils.arguments import require
from ..utils.random import isolated_rng
from ..utils.weighted_mean import State
from .base import Aggregation


# Label of a position that the losses ignore.
IGNORED = -100


class LowRankUpdates(Postprocessor):
    """
    Send the parameter changes of a client as low-rank factors: `Δ_i ≈ U diag(s) V`.

    Each matrix gets the smallest rank that keeps the requested share of its energy, the sum of its squared singular
    values. The share is `low_rank_energy` in the settings of the `Fit` message. [`MutualKD`] adds this postprocessor.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation import LowRankUpdates
    >>> from hf_federated.messages import ClientUpdate, Fit

    >>> sent = Fit(0, "a", 0, {"w": torch.zeros(6, 8)}, settings={"low_rank_energy": 0.95})
    >>> update = ClientUpdate(0, "a", {"w": torch.ones(6, 8)}, num_examples=1, num_tokens=0, num_steps=1)
    >>> {name: tuple(value.shape) for name, value in LowRankUpdates().client_send(update, sent, {}).state.items()}
    {'w/u': (6, 1), 'w/s': (1,), 'w/v': (1, 8)}
    ```
    """

    def client_send(self, update: ClientUpdate, message: Fit, memory: Memory) -> ClientUpdate:
        changes = {
            name: value - message.state[name].to(value) if value.is_floating_point() else value
            for name, value in update.state.items()
        }
        return dataclasses.replace(update, state=compress(changes, message.settings["low_rank_energy"]))

    def server_receive(self, update: ClientUpdate, state: dict[str, torch.Tensor], memory: Memory) -> ClientUpdate:
        try:
            changes = decompress(update.state, reference=state)
        except ValueError as error:
            raise InvalidUpdateError(f"Client {update.client_id!r}, round {update.round + 1}: {error}") from error
        values = {
            name: state[name] + value.to(state[name]) if value.is_floating_point() else value
            for name, value in changes.items()
        }
        return dataclasses.replace(update, state=values)


class Mentor(ClientPart):
    """Client half of [`MutualKD`]: the private model, its optimizer, and the loss of both models."""

    _projection: nn.Linear | None = None

    def receive(self, message: Fit) -> None:
        """
        Prepare the private model of the client, and restore the state that the client kept.

        Args:
            message ([`Fit`]): Message from the server. Its seed is the seed of the initial projection.

        Raises:
            ModelMismatchError: If the kept state does not match the mentor.
            ValueError: If attention maps are matched and a model does not return them.
        """
        context, method, model = self.context, self.method, self.context.model.trainer.model
        trainer, self._exchange = context.open_private_model()  # type: ignore[misc]
        self._trainer = copy.copy(trainer)
        self._trainer.optimizer = None
        self._mentor = trainer.model
        self._predicts_next = predicts_next_token(self._mentor)
        if method.match_attention:
            for description, matched in (("shared model", model), ("private model", self._mentor)):
                check_returns_attention(matched, description)
        if method.match_hidden:
            small, large = model.config.hidden_size, self._mentor.config.hidden_size
            if small != large:
                with isolated_rng(message.seed):
                    self._projection = nn.Linear(small, large, bias=False).to(trainer.args.device)
        self._trainer.create_optimizer()
        if self._projection is not None:
            self._trainer.optimizer.add_param_group({"params": list(self._projection.parameters())})
        if self.memory:
            self._exchange.restore(self.memory["mentor"], context.client_id)
            if self._projection is not None:
                self._projection.load_state_dict(self.memory["projection"])
            self._trainer.optimizer.load_state_dict(self.memory["optimizer"])
        self._mentor.train()

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        method = self.method
        requested = {"output_hidden_states": method.match_hidden, "output_attentions": method.match_attention}
        return {**inputs, **{name: True for name, is_requested in requested.items() if is_requested}}

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        temperature = self.method.temperature
        with self._trainer.compute_loss_context_manager():
            mentor_outputs = self._mentor(**inputs)
        labeled = labeled_positions(outputs["logits"], inputs.get("labels"), self._predicts_next)
        small, large = outputs["logits"][labeled].float(), mentor_outputs.logits[labeled].float()
        distillation_loss = kl_divergence(small, large.detach(), temperature)
        distillation_loss = distillation_loss + kl_divergence(large, small.detach(), temperature)
        mask = inputs.get("attention_mask")
        if self.method.match_hidden:
            hidden_loss = self._hidden_loss(outputs["hidden_states"], mentor_outputs.hidden_states, mask)
            distillation_loss = distillation_loss + hidden_loss
        if self.method.match_attention:
            distillation_loss = distillation_loss + attention_loss(
                outputs["attentions"], mentor_outputs.attentions, mask
            )
        return loss + mentor_outputs.loss + distillation_loss / (loss + mentor_outputs.loss).detach()

    def _hidden_loss(
        self, small: tuple[torch.Tensor, ...], large: tuple[torch.Tensor, ...], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of the MSE of the hidden states over the embeddings and all layers of the mentee."""
        losses = []
        unpadded = unpadded_positions(mask, small[0].shape[:2], small[0].device)
        for layer, hidden in enumerate(small):
            depth = round(layer * (len(large) - 1) / (len(small) - 1))
            projected = hidden if self._projection is None else self._projection(hidden.float())
            losses.append(F.mse_loss(projected[unpadded].float(), large[depth][unpadded].float()))
        return torch.stack(losses).sum()

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        optimizer, args = self._trainer.optimizer, self._trainer.args
        if args.max_grad_norm:
            nn.utils.clip_grad_norm_(
                [parameter for group in optimizer.param_groups for parameter in group["params"]], args.max_grad_norm
            )
        optimizer.step()
        optimizer.zero_grad()

    def send(self, update: ClientUpdate) -> ClientUpdate:
        self.memory["mentor"] = self._exchange.read()
        self.memory["optimizer"] = self._trainer.optimizer.state_dict()
        if self._projection is not None:
            self.memory["projection"] = dict(copy.deepcopy(self._projection.state_dict()))
        return update


class MutualKD(Aggregation):
    """
    MutualKD: a private large model and a shared small model on each client teach each other.

    [Communication-efficient federated learning via knowledge distillation](https://arxiv.org/abs/2108.13323) (Wu et
    al., Nature Communications 13, 2022).

    Each client trains two models that teach each other. The mentee is the small model of the federated trainer. The
    server averages the mentees of the clients. The mentor is a private model of the client, from `clients` or
    `client_model_init`. It is never sent. A local step minimizes

    `L = L_s + L_t + (KL(t ‖ s) + KL(s ‖ t) + Σ_l [MSE(W h_s^l, h_t^l) + MSE(a_s^l, a_t^l)]) / (L_s + L_t)`

    The first argument of each KL divergence and the divisor have no gradient. Because of the divisor, the models
    teach each other less while their losses are high.

    | symbol | meaning |
    |---|---|
    | `s`, `t` | predictions of the mentee and of the mentor |
    | `L_s`, `L_t` | losses of the mentee and of the mentor on the labels |
    | `h_s^l`, `h_t^l` | hidden states of mentee layer `l`, and of the mentor layer at the same relative depth |
    | `a_s^l`, `a_t^l` | attention maps of these layers; means over the heads if the numbers of heads differ |
    | `W` | private projection, used only if the hidden sizes differ |

    For a model that predicts at every position, the KL divergences are means over the positions with a label other
    than -100. The MSE terms are means over the positions, or pairs of positions, that `attention_mask` keeps, so
    padding has no influence.

    The server sends the whole mentee, so a client that was not sampled for some rounds still receives the current
    mentee. The paper compresses this direction too. The matrices of an update are sent as low-rank factors
    ([`LowRankUpdates`]). With secure aggregation, clients send the whole change. The mentor keeps its optimizer
    between rounds and trains with the constant learning rate of its training arguments.

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].
        energy_start (`float`, *optional*, defaults to `0.95`):
            Share of the squared singular values of a matrix that an update keeps at the beginning of the run.
        energy_end (`float`, *optional*, defaults to `0.98`):
            Share that an update keeps in the last round. The share grows linearly over the rounds.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of both KL divergences.
        match_hidden (`bool`, *optional*, defaults to `True`):
            Whether the loss includes the MSE of the hidden states.
        match_attention (`bool`, *optional*, defaults to `False`):
            Whether the loss includes the MSE of the attention maps, as in the paper.

    Raises:
        ValueError: If an energy or the temperature is out of range or `weighting` is unknown. In local training, if
            `match_attention=True` and a model does not return attention maps.

    Requirements:
        Mentors use the tokenizer of the mentee, because both models receive the same tokens. The client optimizer
        keeps the gradients until its step. LOMO and AdaLomo do not. A launch of several processes needs
        `parallelism="clients"`. `match_attention=True` needs both models loaded with `attn_implementation="eager"`,
        because fused attention returns no attention maps.

    Relations:
        - [`FedAvg`] averages the mentees without mentors.
        - [`FedKD`] is a different method (Gong et al.). The paper of MutualKD (Wu et al.) also uses the name FedKD.

    Example:

    ```python
    >>> from hf_federated import MutualKD

    >>> MutualKD(energy_end=0.99)
    MutualKD(energy_end=0.99)
    ```
    """

    name: ClassVar[str] = "mutual_kd"
    supports_late_updates: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = True
    trains_private_models: ClassVar[bool] = True
    client_part: ClassVar[type[ClientPart]] = Mentor
    update_content: ClassVar[str] = "changes"
    disclosures = (Disclosure("change, whole or as factors of its singular value decomposition", "exchanged matrix"),)

    def __init__(
        self,
        weighting: str = "examples",
        energy_start: float = 0.95,
        energy_end: float = 0.98,
        temperature: float = 1.0,
        match_hidden: bool = True,
        match_attention: bool = False,
    ) -> None:
        super().__init__(weighting)
        for name, energy in (("energy_start", energy_start), ("energy_end", energy_end)):
            require(name, energy, 0 < energy <= 1, "above 0 and at most 1")
        require("temperature", temperature, temperature > 0, "positive")
        self.energy_start = energy_start
        self.energy_end = energy_end
        self.temperature = temperature
        self.match_hidden = match_hidden
        self.match_attention = match_attention
        self._num_rounds = 1
        self._round = 0

    def setup(self, num_rounds: int, num_clients: int) -> None:
        self._num_rounds = num_rounds
        self._round = 0

    def postprocessors(self) -> list[Postprocessor]:
        return [LowRankUpdates()]

    def fit_settings(self) -> dict[str, Any]:
        return {"low_rank_energy": energy_schedule(self._round, self._num_rounds, self.energy_start, self.energy_end)}

    def setting_ranges(self) -> dict[str, tuple[float, float]]:
        return {"low_rank_energy": (min(self.energy_start, self.energy_end), max(self.energy_start, self.energy_end))}

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        self._round += 1
        return super().aggregate(accumulator, state)

    def state_dict(self) -> dict[str, Any]:
        return {"round": self._round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._round = state["round"]


def check_returns_attention(model: Any, description: str) -> None:
    """
    Check that a model returns attention maps.

    Args:
        model (`PreTrainedModel`): The model.
        description (`str`): Text for the model in the error message.

    Raises:
        ValueError: If the model uses fused attention, which returns no attention maps.
    """
    found = attention_implementation(model.config)
    if found != "eager":
        raise ValueError(
            f"match_attention=True, but the {description} does not return attention maps with "
            f"attn_implementation={found!r}. Load it with attn_implementation='eager', or set match_attention=False."
        )


def predicts_next_token(model: Any) -> bool:
    """Return whether a model predicts the next token at each position, so that its loss shifts the labels."""
    base_model = model.get_base_model() if isinstance(model, PeftModel) else model
    return type(base_model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def labeled_positions(logits: torch.Tensor, labels: torch.Tensor | None, predicts_next: bool) -> torch.Tensor:
    """
    Return a mask of the predictions that have a label.

    For a model that predicts at every position, these are the predictions whose label is not -100. For other models
    all predictions have a label.

    Args:
        logits (`torch.Tensor` of shape `(batch, num_classes)` or `(batch, sequence, num_classes)`): Predictions.
        labels (`torch.Tensor` of shape `(batch, sequence)`, *optional*): Labels. With labels of another shape, the
            mask is True everywhere.
        predicts_next (`bool`): Whether the label of a prediction is at the next position.

    Returns:
        `torch.Tensor` of shape `(batch,)` or `(batch, sequence)`: Boolean mask.
    """
    if logits.ndim < 3 or labels is None or labels.shape != logits.shape[:-1]:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    if predicts_next:
        # The last position has no next label. It uses its own label, so that sequences without padding count fully.
        labels = torch.cat([labels[:, 1:], labels[:, -1:]], dim=1)
    return labels != IGNORED


def unpadded_positions(mask: torch.Tensor | None, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """
    Return a mask of the positions that are not padding.

    Args:
        mask (`torch.Tensor`, *optional*): `attention_mask`. With a mask of a shape other than `shape`, the result is
            True everywhere.
        shape (`torch.Size`): Batch size and sequence length.
        device (`torch.device`): Device of the result if `mask` is not used.

    Returns:
        `torch.Tensor` of shape `shape`: Boolean mask.
    """
    if mask is None or mask.shape != shape:
        return torch.ones(shape, dtype=torch.bool, device=device)
    return mask.bool()


def attention_loss(
    small: tuple[torch.Tensor, ...], large: tuple[torch.Tensor, ...], mask: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return the sum of the MSE of the attention maps over all layers of the mentee.

    Each layer is compared with the layer of the mentor at the same relative depth.

    Args:
        small (`tuple[torch.Tensor, ...]`): Attention maps of the mentee, one tensor of shape
            `(batch, heads, sequence, sequence)` per layer.
        large (`tuple[torch.Tensor, ...]`): Attention maps of the mentor, with the same sequence length.
        mask (`torch.Tensor` of shape `(batch, sequence)`, *optional*): `attention_mask`. The means are over pairs of
            positions that are not padding.

    Returns:
        `torch.Tensor`: Scalar, float32.
    """
    losses = []
    batch_size, _, num_queries, num_keys = small[0].shape
    queries = unpadded_positions(mask, torch.Size([batch_size, num_queries]), small[0].device)
    keys = unpadded_positions(mask, torch.Size([batch_size, num_keys]), small[0].device)
    pairs = (queries[:, :, None] & keys[:, None, :])[:, None]
    for layer, mentee_map in enumerate(small):
        mentor_map = large[round((layer + 1) * len(large) / len(small)) - 1]
        if mentee_map.shape[1] != mentor_map.shape[1]:
            mentee_map, mentor_map = mentee_map.mean(1, keepdim=True), mentor_map.mean(1, keepdim=True)
        counted = pairs.expand_as(mentee_map)
        losses.append(F.mse_loss(mentee_map[counted].float(), mentor_map[counted].float()))
    return torch.stack(losses).sum()
