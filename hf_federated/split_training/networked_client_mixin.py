"""Networked run of a split trainer on a client: joining a run and leaving it."""

from __future__ import annotations

from transformers.utils import logging

from ..security.peer_envelopes import PeerEnvelopes
from .config import run_digest
from .data_loader_mixin import SplitDataMixin
from .networked_checks import check_networked_evaluation
from .networked_client import NetworkedFederation
from .saving import check_checkpoint, resumable_checkpoints
from .step_plan import count_steps


logger = logging.get_logger(__name__)


class NetworkedClientMixin(SplitDataMixin):
    """Networked run of a split trainer on a client."""

    envelopes: PeerEnvelopes | None

    def _join(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """
        Join a networked run.

        Returns:
            `str`: The checkpoint to resume from, or `None` if the parties have no checkpoint of a common step.

        Raises:
            ValueError: If the client cannot join, or a file of the checkpoint is missing or damaged.
        """
        if self.networked_run is not None:
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
        self.networked_run = NetworkedFederation(
            self.model,
            self.split,
            self.split.resolve_seed(args),
            self.ledger,
            self.envelopes,
            args.train_batch_size * args.gradient_accumulation_steps,
        )
        digest = run_digest(self.model.config, self.split, args, self.model.adapter_config)
        step = self.networked_run.join(digest, num_steps, list(paths))
        try:
            check_networked_evaluation(args, self.split, self.networked_run.steps_per_epoch)
            if step:
                check_checkpoint(paths[step])
        except ValueError:
            self.networked_run.leave()
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
        if self.networked_run is not None:
            self.networked_run.leave()
