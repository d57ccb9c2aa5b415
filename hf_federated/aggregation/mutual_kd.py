"""MutualKD: each client trains a private large model and a shared small one, which teach each other.

Wu et al., Communication-Efficient Federated Learning via Knowledge Distillation (Nature Communications 13, 2022).
Their name for it, FedKD, is also that of [`FedKD`] by Gong et al.

The paper compresses what goes down as well; here the small model goes down whole, so that a client that was not asked
for some rounds has it too.
"""

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

from ..distillation.losses import kl_divergence
from ..distillation.low_rank import compress, decompress, energy_schedule
from ..messages import ClientUpdate, Disclosure, Fit
from ..messages.validation import InvalidUpdateError
from ..postprocessing import Postprocessor
from ..utils.random import isolated_rng
from ..utils.weighted_mean import State
from .base import Accumulator, Aggregation, LocalHook


# The label of a position that no loss counts.
IGNORED = -100


class LowRankUpdates(Postprocessor):
    """
    What a client changed travels as singular vectors: `Δ_i ≈ U diag(s) V`, of each matrix with the smallest rank that
    keeps the energy asked for.

    The energy is in the settings of the message that the client answers, under `low_rank_energy`. [`MutualKD`]
    installs it.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation import LowRankUpdates
    >>> from hf_federated.messages import ClientUpdate, Fit

    >>> sent = Fit(0, "a", 0, {"w": torch.zeros(6, 8)}, settings={"low_rank_energy": 0.95})
    >>> update = ClientUpdate(0, "a", {"w": torch.ones(6, 8)}, num_examples=1, num_tokens=0, num_steps=1)
    >>> {name: tuple(value.shape) for name, value in LowRankUpdates().client_side(update, sent).state.items()}
    {'w/u': (6, 1), 'w/s': (1,), 'w/v': (1, 8)}
    ```
    """

    def client_side(self, update: ClientUpdate, message: Fit) -> ClientUpdate:
        changes = {
            name: value - message.state[name].to(value) if value.is_floating_point() else value
            for name, value in update.state.items()
        }
        return dataclasses.replace(update, state=compress(changes, message.settings["low_rank_energy"]))

    def server_side(self, update: ClientUpdate, state: dict[str, torch.Tensor]) -> ClientUpdate:
        try:
            changes = decompress(update.state, reference=state)
        except ValueError as error:
            raise InvalidUpdateError(f"Client {update.client_id!r}, round {update.round}: {error}") from error
        values = {
            name: state[name] + value.to(state[name]) if value.is_floating_point() else value
            for name, value in changes.items()
        }
        return dataclasses.replace(update, state=values)


class MutualKD(Aggregation):
    """
    The federated trainer's model is the small one, the mentee, which is averaged. Each client also has a private one,
    the mentor, from `clients` or `client_model_init`, which never travels. In a local step both learn the labels and
    each other, `L_s` and `L_t` being their losses on the labels:

    `L = L_s + L_t + (KL(t ‖ s) + KL(s ‖ t) + Σ_l [MSE(W h_s^l, h_t^l) + MSE(a_s^l, a_t^l)]) / (L_s + L_t)`

    where a KL's first argument and the divisor have no gradient: the less sure both are, the less they teach. Layer
    `l` of the mentee stands beside that of the mentor at the same depth; `W`, which is private too, is there where
    hidden sizes differ, and the attention maps `a`, which the paper matches too, are the means over heads where their
    numbers differ. Where a model predicts at every position, the KLs are means over those with a label (not −100), and
    the MSEs are means over positions, and pairs of them, that `attention_mask` does not hide: padding teaches nothing.
    Matrices of an update travel as singular vectors ([`LowRankUpdates`]).

    Both read the same tokens, so mentors need the mentee's tokenizer. The mentor keeps its optimizer from round to
    round, at the constant learning rate of its training arguments.

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            As in [`Aggregation`].
        energy_start (`float`, *optional*, defaults to `0.95`):
            Share of a matrix's squared singular values that travels at the beginning of the run.
        energy_end (`float`, *optional*, defaults to `0.98`):
            And at its end; between them it grows evenly.
        temperature (`float`, *optional*, defaults to `1.0`):
            Of both KL divergences.
        match_hidden (`bool`, *optional*, defaults to `True`):
            Whether hidden states are matched.
        match_attention (`bool`, *optional*, defaults to `False`):
            Whether attention maps are matched, as in the paper. Fused attention returns none: both models have to be
            loaded with `attn_implementation="eager"`.

    Raises:
        ValueError: If an energy or the temperature is out of range; in a client's training, if attention is to be
            matched and a model does not return it.

    Example:

    ```python
    >>> from hf_federated import MutualKD

    >>> MutualKD(energy_end=0.99)
    MutualKD(energy_end=0.99)
    ```
    """

    name: ClassVar[str] = "mutual_kd"
    needs_gradients: ClassVar[bool] = True
    trains_private_models: ClassVar[bool] = True
    update_content: ClassVar[str] = "changes"

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
        energy_schedule(0, 1, energy_start, energy_end)
        if not temperature > 0:
            raise ValueError(f"`temperature` is {temperature}; it must be positive.")
        self.energy_start = energy_start
        self.energy_end = energy_end
        self.temperature = temperature
        self.match_hidden = match_hidden
        self.match_attention = match_attention
        self._num_rounds = 1
        self._round = 0

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        factors = "factors of the singular value decomposition of its change, or the change if it has fewer values"
        return (Disclosure(factors, "exchanged matrix"),)

    def setup(self, num_rounds: int, num_clients: int) -> None:
        self._num_rounds = num_rounds
        self._round = 0

    def postprocessors(self) -> list[Postprocessor]:
        return [LowRankUpdates()]

    def fit_settings(self) -> dict[str, Any]:
        energy = energy_schedule(self._round, self._num_rounds, self.energy_start, self.energy_end)
        return {"low_rank_energy": energy}

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        self._round += 1
        return super().aggregate(accumulator, state)

    def state_dict(self) -> dict[str, Any]:
        return {"round": self._round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._round = state["round"]

    def local_hook(self, message: Fit, kept: dict[str, Any] | None) -> LocalHook:
        return Mentor(self.temperature, self.match_hidden, self.match_attention, message.seed, message.client_id, kept)


class Mentor(LocalHook):
    """
    The client side of [`MutualKD`]: the private model, its optimizer, and the loss of both.

    Args:
        temperature (`float`): Of both KL divergences.
        match_hidden (`bool`): Whether hidden states are matched.
        match_attention (`bool`): Whether attention maps are.
        seed (`int`): Of what is drawn: the projection, the mentor's dropout.
        client_id (`str`): Whose mentor it is.
        kept (`dict`, *optional*): What this client kept: the mentor, the projection, the optimizer.
    """

    changes_loss: ClassVar[bool] = True

    def __init__(
        self,
        temperature: float,
        match_hidden: bool,
        match_attention: bool,
        seed: int,
        client_id: str,
        kept: dict[str, Any] | None,
    ) -> None:
        self._temperature = temperature
        self._match_hidden = match_hidden
        self._match_attention = match_attention
        self._seed = seed
        self._client_id = client_id
        self._kept = kept
        self._projection: nn.Linear | None = None

    def start(self, trainer: Any, exchange: Any, model: Any) -> None:
        """
        Take the client's private model.

        Args:
            trainer (`transformers.Trainer`): Around the mentor as it is before the first round.
            exchange ([`Exchange`]): Of the mentor.
            model (`PreTrainedModel`): The shared one, the mentee.

        Raises:
            ModelMismatchError: If what the client kept is not of this mentor.
        """
        self._trainer, self._exchange = copy.copy(trainer), exchange
        self._trainer.optimizer = None
        self._mentor = trainer.model
        self._predicts_next = predicts_next_token(self._mentor)
        if self._match_attention:
            for what, own in (("shared model", model), ("private model", self._mentor)):
                check_returns_attention(own, what)
        if self._match_hidden:
            small, large = model.config.hidden_size, self._mentor.config.hidden_size
            if small != large:
                with isolated_rng(self._seed):
                    self._projection = nn.Linear(small, large, bias=False).to(trainer.args.device)
        self._trainer.create_optimizer()
        if self._projection is not None:
            self._trainer.optimizer.add_param_group({"params": list(self._projection.parameters())})
        if self._kept is not None:
            exchange.restore(self._kept["mentor"], self._client_id)
            if self._projection is not None:
                self._projection.load_state_dict(self._kept["projection"])
            self._trainer.optimizer.load_state_dict(self._kept["optimizer"])
        self._mentor.train()

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        asked = {"output_hidden_states": self._match_hidden, "output_attentions": self._match_attention}
        return {**inputs, **{name: True for name, is_asked in asked.items() if is_asked}}

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        with self._trainer.compute_loss_context_manager():
            theirs = self._mentor(**inputs)
        learnt = learnt_positions(outputs["logits"], inputs.get("labels"), self._predicts_next)
        small, large = outputs["logits"][learnt].float(), theirs.logits[learnt].float()
        taught = kl_divergence(small, large.detach(), self._temperature)
        taught = taught + kl_divergence(large, small.detach(), self._temperature)
        mask = inputs.get("attention_mask")
        if self._match_hidden:
            taught = taught + self._hidden_loss(outputs["hidden_states"], theirs.hidden_states, mask)
        if self._match_attention:
            taught = taught + attention_loss(outputs["attentions"], theirs.attentions, mask)
        return loss + theirs.loss + taught / (loss + theirs.loss).detach()

    def _hidden_loss(
        self, small: tuple[torch.Tensor, ...], large: tuple[torch.Tensor, ...], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Of every layer of the mentee and of the embeddings, which come first."""
        losses = []
        shown = shown_positions(mask, small[0].shape[:2], small[0].device)
        for layer, hidden in enumerate(small):
            depth = round(layer * (len(large) - 1) / (len(small) - 1))
            projected = hidden if self._projection is None else self._projection(hidden.float())
            losses.append(F.mse_loss(projected[shown].float(), large[depth][shown].float()))
        return torch.stack(losses).sum()

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        optimizer, args = self._trainer.optimizer, self._trainer.args
        if args.max_grad_norm:
            nn.utils.clip_grad_norm_(
                [item for group in optimizer.param_groups for item in group["params"]], args.max_grad_norm
            )
        optimizer.step()
        optimizer.zero_grad()

    def finish(self) -> tuple[State, dict[str, Any] | None]:
        kept = {"mentor": self._exchange.read(), "optimizer": self._trainer.optimizer.state_dict()}
        if self._projection is not None:
            kept["projection"] = {
                name: value.detach().clone() for name, value in self._projection.state_dict().items()
            }
        return {}, kept


def check_returns_attention(model: Any, what: str) -> None:
    """
    Raises:
        ValueError: If a model's attention is fused, so that it returns no maps.
    """
    found = getattr(model.config, "_attn_implementation", None)
    if found != "eager":
        raise ValueError(
            f"MutualKD matches attention, which the {what} does not return with attn_implementation={found!r}: load it"
            " with 'eager', or leave match_attention out."
        )


def predicts_next_token(model: Any) -> bool:
    """Whether a model's prediction at a position is of the token behind it, so that its loss shifts the labels."""
    bare = model.get_base_model() if isinstance(model, PeftModel) else model
    return type(bare).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def learnt_positions(logits: torch.Tensor, labels: torch.Tensor | None, predicts_next: bool) -> torch.Tensor:
    """
    Which predictions the labels are about: of a model that predicts at every position, those whose label is not −100.

    Args:
        logits (`torch.Tensor`): Of shape `(rows, classes)` or `(rows, positions, classes)`.
        labels (`torch.Tensor`, *optional*): Of shape `(rows, positions)`. Labels of another shape leave nothing out.
        predicts_next (`bool`): Whether the label of a prediction stands one position behind it.

    Returns:
        `torch.Tensor`: Bool, of the logits' shape without the classes.
    """
    if logits.ndim < 3 or labels is None or labels.shape != logits.shape[:-1]:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    if predicts_next:
        # No label is behind the last position; it goes with its own, so that all count in a row without padding.
        labels = torch.cat([labels[:, 1:], labels[:, -1:]], dim=1)
    return labels != IGNORED


def shown_positions(mask: torch.Tensor | None, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """
    Which positions are no padding.

    Args:
        mask (`torch.Tensor`, *optional*): `attention_mask`. One that is not of this shape leaves nothing out.
        shape (`torch.Size`): Rows and positions.
        device (`torch.device`): Of the result.

    Returns:
        `torch.Tensor`: Bool, of that shape.
    """
    if mask is None or mask.shape != shape:
        return torch.ones(shape, dtype=torch.bool, device=device)
    return mask.bool()


def attention_loss(
    small: tuple[torch.Tensor, ...], large: tuple[torch.Tensor, ...], mask: torch.Tensor | None = None
) -> torch.Tensor:
    """
    The summed MSE of attention maps, each layer's beside that at the same depth.

    Args:
        small (`tuple[torch.Tensor, ...]`): The mentee's, of shape `(rows, heads, positions, positions)`.
        large (`tuple[torch.Tensor, ...]`): The mentor's, of as many positions.
        mask (`torch.Tensor`, *optional*): `attention_mask`, of shape `(rows, positions)`: the mean is over pairs of
            positions that are no padding.

    Returns:
        `torch.Tensor`: A scalar, float32.
    """
    losses = []
    rows, _, asking, asked = small[0].shape
    of_both = [shown_positions(mask, torch.Size([rows, number]), small[0].device) for number in (asking, asked)]
    pairs = (of_both[0][:, :, None] & of_both[1][:, None, :])[:, None]
    for layer, own in enumerate(small):
        theirs = large[round((layer + 1) * len(large) / len(small)) - 1]
        if own.shape[1] != theirs.shape[1]:
            own, theirs = own.mean(1, keepdim=True), theirs.mean(1, keepdim=True)
        counted = pairs.expand_as(own)
        losses.append(F.mse_loss(own[counted].float(), theirs[counted].float()))
    return torch.stack(losses).sum()
