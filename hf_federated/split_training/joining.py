"""How a client whose server is elsewhere joins a run, and leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ..security.peer_envelopes import PeerEnvelopes
from .checkpoint import resumable_checkpoints
from .checks import check_networked_evaluation
from .digest import run_digest
from .remote import RemoteFederation
from .saving import SplitSavingMixin
from .steps import steps_of_rows


logger = logging.get_logger(__name__)


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
