"""A networked run as one of its clients sees it: it trains its head and tail, and the server is behind a link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.utils import logging

from ..aggregation import WeightedMean
from ..messages.ledger import Ledger
from ..security.envelope import PeerEnvelopes
from ..security.sealed import SealedLink
from ..split.model import SplitModel
from ..utils.random import derived_seed, own_draws, seed_generators
from .checks import check_networked_evaluation
from .config import SplitConfig, run_digest
from .in_process import ClientParty, TrainClient
from .link_wrappers import LateError, RunLink, counted
from .messages import (
    Begin,
    Begun,
    Fetch,
    Fetched,
    Finish,
    Join,
    Joined,
    PartParameters,
    Send,
    Sent,
    Step,
    Stepped,
    as_bytes,
    as_tensor,
)
from .optimization import JointOptimizer, Party
from .saving import SplitSavingMixin, resumable_checkpoints
from .step_plan import StepPlan, steps_of_rows


logger = logging.get_logger(__name__)


class RemoteFederation:
    """
    The client's side of a networked run, in the place of a [`SplitFederation`].

    Args:
        model ([`SplitModel`]): The client's head and tail, with a link to a [`TrainingServer`]; no body.
        config ([`SplitConfig`]): As the server has it.
        seed (`int`): Of what this client draws.
        ledger ([`Ledger`]): Counts what crosses, by optimizer step.
        envelopes ([`~split.envelope.PeerEnvelopes`], *optional*): Seals parameters for other clients. One client alone
            needs none.
    """

    def __init__(
        self,
        model: SplitModel,
        config: SplitConfig,
        seed: int,
        ledger: Ledger,
        envelopes: PeerEnvelopes | None,
    ) -> None:
        self.model = model
        self.config = config
        self.seed = seed
        self.ledger = ledger
        self.envelopes = envelopes
        self.client_id = model.boundary.client_id
        self.step = 0
        self.max_steps = 0
        self.client_ids: list[str] = []
        self.num_late = 0
        self._is_sealed = isinstance(model.boundary.link, SealedLink)
        self._link = RunLink(counted(model.boundary.link, self.client_id, self._count))
        model.boundary.link = self._link
        model.boundary.defers_backward = config.strategy == "client_batch"
        self.client = ClientParty(self.client_id, model)
        # Steps of each client in an epoch.
        self.steps_of: dict[str, int] = {}
        self.plan = StepPlan({}, together=False)
        # Of the steps in which this client took part: since they were logged last, and of all.
        self._losses: list[torch.Tensor] = []
        self._logged: list[float] = []
        self._averaged_at = -1
        self._finished = False
        self._left = False

    def _count(self, client_id: str, bytes_up: int, bytes_down: int) -> None:
        self.ledger.record(self.step, client_id, bytes_down=bytes_down, bytes_up=bytes_up)

    def join(self, digest: str, num_steps: int, checkpoints: Sequence[int]) -> int:
        """
        Wait until everybody is there.

        Args:
            digest (`str`): Of all settings that parties must have in common.
            num_steps (`int`): Optimizer steps that this client's rows make in an epoch.
            checkpoints (`Sequence[int]`): Steps of the checkpoints that it can go on from.

        Returns:
            `int`: The step to go on from; 0 begins anew.

        Raises:
            ValueError: If the server refuses, or others could not be sent what is sealed for them.
        """
        introduction = b"" if self.envelopes is None else self.envelopes.introduction(digest)
        message = Join(self.client_id, digest, num_steps, sorted(checkpoints), as_tensor(introduction))
        joined: Joined = self._link.ask(message, Joined)
        self.client_ids = list(joined.steps_of)
        if self.client_id not in joined.steps_of or joined.introductions.keys() != joined.steps_of.keys():
            raise ValueError(f"The server names other clients than those that take part with {self.client_id!r}.")
        if len(self.client_ids) > 1:
            if self.envelopes is None:
                raise ValueError(
                    "Clients hand parameters over, or average them, sealed for one another: give `envelopes`, with "
                    "the fingerprints of the others."
                )
            self.envelopes.meet(digest, {own: as_bytes(value) for own, value in joined.introductions.items()})
        self.steps_of = joined.steps_of
        self.plan = StepPlan(joined.steps_of, self.config.strategy != "serial", self.config.steps_per_turn)
        return joined.resume_step

    @property
    def parties(self) -> dict[str, Party]:
        """This client."""
        return {self.client.name: self.client}

    def _taking_part(self, step: int) -> list[str]:
        return list(self.plan[step % len(self.plan)])

    def run_step(
        self,
        step: int,
        batches: Mapping[str, Any],
        num_rows: Mapping[str, int],
        num_targets: Mapping[str, int | None],
        train: TrainClient,
        optimizer: JointOptimizer,
    ) -> torch.Tensor:
        """As of a [`SplitFederation`]; nothing where this client takes no part in the step."""
        self.step = step
        optimizer.groups = []
        if self.client_id not in batches:
            return torch.zeros(())
        boundary = self.model.boundary
        try:
            self._take_over()
            own = batches[self.client_id]
            self._link.ask(Begin(self.client_id, step, len(own), num_rows[self.client_id]), Begun)
            boundary.begin_step(step, num_targets[self.client_id] if boundary.defers_backward else None)
            with own_draws(self.seed):
                seed_generators(derived_seed(self.seed, "client", self.client_id, step))
                loss = train(self.client, own)
        except LateError:
            self._give_up_step()
            return torch.zeros(())
        self.client.num_rows += num_rows[self.client_id]
        optimizer.groups = [[self.client.name]]
        self._losses.append(loss.detach())
        return loss

    def own_losses(self, logs: dict[str, float]) -> None:
        """
        Let losses that are logged be means over the steps in which this client took part, not over everybody's.

        Args:
            logs (`dict[str, float]`): What is logged; where the client took part in no step, without a loss then.
        """
        if not logs.keys() & {"loss", "train_loss"}:
            return
        recent, self._losses = [float(own) for own in self._losses], []
        self._logged += recent
        for name, losses in (("loss", recent), ("train_loss", self._logged)):
            if name in logs and losses:
                logs[name] = math.fsum(losses) / len(losses)
            else:
                logs.pop(name, None)

    def _give_up_step(self) -> None:
        self.num_late += 1
        self.client.zero_grad()

    def shared_norm(self, squared_norm: float) -> float | None:
        """
        The norm by which this client clips: that of everybody who shares the step.

        Args:
            squared_norm (`float`): Of this client's gradients.

        Returns:
            `float`: The norm; `None` where the step went on without this client, which then must not step.
        """
        try:
            stepped: Stepped = self._link.ask(Step(self.client_id, self.step, squared_norm), Stepped)
        except LateError:
            self._give_up_step()
            return None
        return stepped.norm

    def _take_over(self) -> None:
        """Of clients that hand over: what the one before trained."""
        if self.config.hands_over and self.step > 0:
            (before,) = self._taking_part(self.step - 1)
            if before != self.client_id:
                self.client.load(self._fetch(before).state)

    def hand_over(self) -> None:
        """Of clients that hand over: to the one whose turn follows on this client's."""
        if not self.config.hands_over or self.step in (0, self.max_steps):
            return
        (before,), (after,) = self._taking_part(self.step - 1), self._taking_part(self.step)
        if before == self.client_id != after:
            self._send(after, self.client.state())

    def end_step(self, num_steps: int) -> None:
        """Hand over or average, where it is time."""
        self.step = num_steps
        if self.client_id not in self._taking_part(num_steps - 1):
            # What it evaluates and saves is of this step.
            self._link.ask(Begin(self.client_id, num_steps, 0, 0), Begun)
        every = self.config.average_every
        if every is not None and num_steps % every == 0:
            self.average()
        self.hand_over()
        if num_steps == self.max_steps:
            self.finish()

    def average(self) -> None:
        """
        All clients' parts become their mean, weighted by rows. The first client makes it: the server must not see
        what it is made of.
        """
        self._averaged_at = self.step
        first = self.client_ids[0]
        if self.client_id != first:
            self._send(first, self.client.state())
            self.client.load(self._fetch(first).state)
        else:
            messages = [PartParameters(first, self.step, self.client.num_rows, self.client.state())]
            messages += [self._fetch(own) for own in self.client_ids[1:]]
            weighted = [own for own in messages if own.num_rows]
            mean = WeightedMean()
            for own in weighted or messages:
                mean.add(own.state, own.num_rows or 1)
            state = mean.finalize()
            for other in self.client_ids[1:]:
                self._send(other, state)
            self.client.load(state)
        self.client.num_rows = 0

    def finish(self) -> None:
        """After the last step: every client has what the last holder trained, or the mean of all."""
        if self._finished:
            return
        self._finished = True
        if not self.config.hands_over:
            if self._averaged_at != self.step:
                self.average()
        else:
            (holder,) = self._taking_part(self.max_steps - 1)
            if holder == self.client_id:
                for other in self.client_ids:
                    if other != holder:
                        self._send(other, self.client.state())
            else:
                self.client.load(self._fetch(holder).state)

    def leave(self) -> None:
        """Tell the server that nothing more is asked of it. Before the last step this ends the run for all."""
        if not self._left:
            self._left = True
            self._link.exchange(Finish(self.client_id, self.step).to_bytes())

    def _send(self, recipient: str, state: Mapping[str, torch.Tensor]) -> None:
        assert self.envelopes is not None
        payload = PartParameters(self.client_id, self.step, self.client.num_rows, dict(state)).to_bytes()
        sealed = self.envelopes.seal(recipient, f"step {self.step}", payload)
        self._link.ask(Send(self.client_id, self.step, recipient, as_tensor(sealed)), Sent)

    def _fetch(self, sender: str) -> PartParameters:
        assert self.envelopes is not None
        fetched: Fetched = self._link.ask(Fetch(self.client_id, self.step, sender), Fetched)
        payload = self.envelopes.open(sender, f"step {self.step}", as_bytes(fetched.sealed))
        message = PartParameters.from_bytes(payload)
        # A mean would stretch what is too small.
        self.client.check(message.state, f"what client {sender!r} sent")
        return message

    def facts(self) -> dict[str, Any]:
        """What a card says of the run beside this party."""
        return {
            "num_clients": len(self.client_ids),
            "is_finished": self._finished,
            "num_late": self.num_late,
            "is_sealed": self._is_sealed,
        }

    def copy_into_model(self) -> None:
        """Nothing: the model is this client's own."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the party's own state."""
        return {
            "config": self.config.to_dict(),
            "client_id": self.client_id,
            "clients": self.client_ids,
            "num_rows": self.client.num_rows,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: If the run was another one.
        """
        expected = {"config": self.config.to_dict(), "client_id": self.client_id, "clients": self.client_ids}
        for name, own in expected.items():
            if state.get(name) != own:
                raise ValueError(f"The checkpoint is of a run with {name}={state.get(name)}, this one has {own}.")
        self.client.num_rows = state["num_rows"]


class JoiningMixin(SplitSavingMixin):
    """The networked client's side of a split trainer."""

    # The clients' rows as they are trained on.
    _rows: Mapping[str, Any]
    _envelopes: PeerEnvelopes | None

    def _join(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Join a networked run; the checkpoint to go on from, if everybody has one of the same step."""
        assert self.clients is not None
        if self._remote is not None:
            raise ValueError("This trainer took part in a networked run already: build a new one, on a new link.")
        check_networked_evaluation(self.args, self.split)
        if not isinstance(resume_from_checkpoint, (bool, type(None))):
            raise ValueError("In a networked run all resume the same step: resume_from_checkpoint is True or not.")
        paths = resumable_checkpoints(self.args.output_dir) if resume_from_checkpoint else {}
        args, num_rows = self.args, len(self._rows[next(iter(self.clients))])
        num_steps = steps_of_rows(
            num_rows, args.train_batch_size, args.gradient_accumulation_steps, args.dataloader_drop_last
        )
        self._remote = RemoteFederation(self.model, self.split, self.split.seed_of(args), self.ledger, self._envelopes)
        digest = run_digest(self.model.config, self.split, args, self.model.adapter_config)
        step = self._remote.join(digest, num_steps, list(paths))
        try:
            check_networked_evaluation(args, self.split, self._remote.steps_of)
        except ValueError:
            self._remote.leave()
            raise
        if paths and not step:
            logger.warning(f"Others have no checkpoint of the steps {sorted(paths)}: the run begins anew.")
        return paths[step] if step else None

    def leave(self) -> None:
        """Of a networked run: tell the server that nothing more is asked of it, also no evaluation."""
        if self._remote is not None:
            self._remote.leave()
