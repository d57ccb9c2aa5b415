"""A run that is killed in the midst of a round's distillation goes on to the same bytes, whatever the method."""

from __future__ import annotations

import pytest
from distilled import METHODS, SHARED_MODEL, Recorder, distilled, same_clients
from tiny import same_weights

from hf_federated.messages import Message


ARGUMENTS = {"save_strategy": "epoch", "eval_strategy": "epoch"}
# One message of these, of the second round, is the last one that a client sees.
KILLED_AT = {"fedid": "feedback", "feddf": "fit", "fedaux": "fit", "feddrs": "fit", "feded": "predict"}
OFTEN = ("chain_rule", "mpl_sampled", None)
TRIED = [
    pytest.param(method, kwargs, marks=[] if kwargs.get("feedback") in OFTEN else [pytest.mark.slow])
    for method, kwargs in METHODS
    if method != "fedkd"  # of one round
]


class Killed(KeyboardInterrupt):
    """As if the process had been."""


class Kill(Recorder):
    """Ends the run at the second message of a kind in the second round."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_round_begin(self, args, state, control, **kwargs):
        super().on_round_begin(args, state, control, **kwargs)
        if state.global_step != 1:
            return
        worker, seen = self.trainer.engine.worker, []
        handle = worker.handle

        def ended(message: Message) -> Message:
            seen.append(message.kind)
            if seen.count(self.kind) == 2:
                raise Killed
            return handle(message)

        worker.handle = ended


def lasting(log):
    """The entries without what a clock says, and without the summary of a `train()` call."""
    clocks = ("runtime", "per_second", "train_loss", "total_flos")
    return [
        {name: value for name, value in entry.items() if not any(clock in name for clock in clocks)} for entry in log
    ]


@pytest.mark.parametrize(("method", "kwargs"), TRIED)
def test_a_run_killed_in_a_distillation_resumes_to_the_same_bytes(tmp_path, method, kwargs):
    # Not all clients take part.
    federation = {"num_rounds": 3, "clients_per_round": 2, "client_optimizer_state": "carry"}
    whole = distilled(tmp_path / "a", method, kwargs, federation=federation, args=ARGUMENTS)
    whole.train()
    # What they keep lies on a disk, which changes nothing.
    federation["client_store"] = "disk"
    if method not in SHARED_MODEL:
        federation["max_resident_clients"] = 1
    given = {"federation": federation, "args": ARGUMENTS}
    with pytest.raises(Killed):
        distilled(tmp_path / "b", method, kwargs, record=Kill(KILLED_AT.get(method, "distill")), **given).train()
    resumed = distilled(tmp_path / "b", method, kwargs, **given)
    resumed.train(resume_from_checkpoint=True)
    assert same_weights(whole.model, resumed.model) and same_clients(whole, resumed)
    assert whole.ledger.to_dict() == resumed.ledger.to_dict()
    assert lasting(whole.state.log_history) == lasting(resumed.state.log_history)
