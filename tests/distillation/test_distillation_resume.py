"""For every method, a run that is killed during a distillation resumes and gives identical weights."""

from __future__ import annotations

import pytest
from distillation_setup import METHODS, SHARED_MODEL, Recorder, distillation_trainer, same_clients
from tiny import same_weights

from hf_federated.messages import Message


ARGUMENTS = {"save_strategy": "epoch", "eval_strategy": "epoch"}
# The kind of message at which the run of a method is killed, in the second round. The default is "distill".
KILLED_AT = {"fedid": "feedback", "feddf": "fit", "fedaux": "fit", "feddrs": "fit", "feded": "predict"}
# Methods and settings with the same state between rounds as others.
SLOW_METHODS = ("cronus", "feddf", "fedmd", "mhat")
SLOW_SETTINGS = ({"feedback": "per_example"}, {"feedback": "mpl"}, {"feedback": "none"}, {"weighting": "enwc"})
CASES = [
    pytest.param(method, kwargs, marks=[pytest.mark.slow] if method in SLOW_METHODS or kwargs in SLOW_SETTINGS else [])
    for method, kwargs in METHODS
    if method != "fedkd"  # FedKD has one round only.
]


class Killed(KeyboardInterrupt):
    """Ends a run as if the process were killed."""


class Kill(Recorder):
    """End the run at the second message of a kind in the second round."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_round_begin(self, args, state, control, **kwargs):
        super().on_round_begin(args, state, control, **kwargs)
        if state.global_step != 1:
            return
        worker, seen = self.trainer.engine.worker, []
        handle = worker.handle

        def handle_or_kill(message: Message) -> Message:
            seen.append(message.kind)
            if seen.count(self.kind) == 2:
                raise Killed
            return handle(message)

        worker.handle = handle_or_kill


def without_timings(log):
    """Log entries without timings and without the summary of a `train()` call."""
    timings = ("runtime", "per_second", "train_loss", "total_flos")
    return [
        {name: value for name, value in entry.items() if not any(timing in name for timing in timings)}
        for entry in log
    ]


@pytest.mark.parametrize(("method", "kwargs"), CASES)
@pytest.mark.sampled(3)
def test_resume_after_kill_during_distillation_gives_identical_weights(tmp_path, method, kwargs):
    # Each round has a subset of the clients.
    federation = {"num_rounds": 3, "clients_per_round": 2, "client_optimizer_state": "carry", "local_epochs": 1}
    uninterrupted = distillation_trainer(tmp_path / "a", method, kwargs, federation=federation, args=ARGUMENTS)
    uninterrupted.train()
    # The killed run keeps the state of clients on disk, which must not change the result.
    federation["client_store"] = "disk"
    if method not in SHARED_MODEL:
        federation["max_resident_clients"] = 1
    settings = {"federation": federation, "args": ARGUMENTS}
    with pytest.raises(Killed):
        distillation_trainer(
            tmp_path / "b", method, kwargs, record=Kill(KILLED_AT.get(method, "distill")), **settings
        ).train()
    resumed = distillation_trainer(tmp_path / "b", method, kwargs, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert same_weights(uninterrupted.model, resumed.model) and same_clients(uninterrupted, resumed)
    assert uninterrupted.ledger.to_dict() == resumed.ledger.to_dict()
    assert without_timings(uninterrupted.state.log_history) == without_timings(resumed.state.log_history)
