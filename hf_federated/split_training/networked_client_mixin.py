"""Networked run of a split trainer on a client: joining a run and leaving it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ..security.peer_envelopes import PeerEnvelopes
from .checks import check_networked_evaluation
from .config import run_digest
from .networked_client import NetworkedFederation
from .saving import SplitSavingMixin, check_checkpoint, resumable_checkpoints
from .step_plan import count_steps


logger = logging.get_logger(__name__)


class NetworkedClientMixin(SplitSavingMixin):
    """Networked run of a split trainer on a client."""

    # The prepared training dataset of each client.
    _client_datasets: Mapping[str, Any]
    _envelopes: PeerEnvelopes | None

    def _join(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """
        Join a networked run.

        Returns:
            `str`: The checkpoint to resume from, or `None` if the parties have no checkpoint of a common step.

        Raises:
            ValueError: If the client cannot join, or a file of the checkpoint is missing or damaged.
        """
        if self._networked is not None:
            raise ValueError("This trainer has joined a networked run before. Create a new trainer with a new link.")
        check_networked_evaluation(self.args, self.split)
        if not isinstance(resume_from_checkpoint, (bool, type(None))):
            raise ValueError(
                "In a networked run all parties resume from the same step. Set resume_from_checkpoint to True or "
                "leave it out."
            )
        paths = resumable_checkpoints(self.args.output_dir) if resume_from_checkpoint else {}
        args, num_examples = self.args, len(self._client_datasets[self.model.boundary.client_id])
        num_steps = count_steps(
            num_examples, args.train_batch_size, args.gradient_accumulation_steps, args.dataloader_drop_last
        )
        self._networked = NetworkedFederation(
            self.model,
            self.split,
            self.split.resolve_seed(args),
            self.ledger,
            self._envelopes,
            args.train_batch_size * args.gradient_accumulation_steps,
        )
        digest = run_digest(self.model.config, self.split, args, self.model.adapter_config)
        step = self._networked.join(digest, num_steps, list(paths))
        try:
            check_networked_evaluation(args, self.split, self._networked.steps_per_epoch)
            if step:
                check_checkpoint(paths[step])
        except ValueError:
            self._networked.leave()
            raise
        if paths and not step:
            logger.warning(
                f"No checkpoint of the steps {sorted(paths)} exists on all parties. The run starts from scratch."
            )
        return paths[step] if step else None

    def leave(self) -> None:
        """
        Report to the server of a networked run that this client sends no further requests, including evaluations.
        """
        if self._networked is not None:
            self._networked.leave()
