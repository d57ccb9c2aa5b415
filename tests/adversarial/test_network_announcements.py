"""A client on another machine that announces too many examples, over a network: refused by name, or bounded."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch
from threaded_clients import ANNOUNCED, honest, run_with_threads
from tiny import same_weights

from hf_federated import FederatedTrainer
from hf_federated.messages import Announcement, ClientUpdate, Message
from hf_federated.trainer.announcement_limits import AnnouncementError


HONEST, HOSTILE = ("north", "south"), "west"
NUM_EXAMPLES = 8
HUGE = 10**12


def announces(number: int) -> Announcement:
    return dataclasses.replace(ANNOUNCED, num_examples=number, num_encoded_examples=number, class_counts=None)


def claims(number: int, factor: float = -25.0):
    """Claim a number of examples, and change the model by a multiple of the honest change."""

    def reply(request: Message) -> Message:
        answer = honest(request)
        if not isinstance(answer, ClientUpdate):
            return answer
        state = {name: value + factor * 0.01 for name, value in request.state.items()}
        return dataclasses.replace(answer, state=state, num_examples=number, num_steps=min(2, number))

    return reply


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> FederatedTrainer:
    """A run with the honest clients only."""
    return run_with_threads(tmp_path_factory.mktemp("alone"), dict.fromkeys(HONEST, honest), {})[0]


def test_huge_announcement_ends_the_run_before_the_first_round(tmp_path):
    asked: list[str] = []

    def counted(request: Message) -> Message:
        asked.append(request.client_id)
        return honest(request)

    with pytest.raises(
        AnnouncementError, match=f"Client 'west' announced num_examples={HUGE}, .* median .* clients, 8"
    ):
        run_with_threads(
            tmp_path, {**dict.fromkeys(HONEST, counted), HOSTILE: claims(HUGE)}, {HOSTILE: announces(HUGE)}
        )
    assert asked == []


def test_client_above_the_agreed_number_is_refused_and_the_others_train(tmp_path, alone, caplog):
    errors: dict[str, Exception] = {}
    trainer, rejected = run_with_threads(
        tmp_path,
        {**dict.fromkeys(HONEST, honest), HOSTILE: claims(HUGE)},
        {HOSTILE: announces(HUGE)},
        errors,
        max_examples_per_client=NUM_EXAMPLES,
    )
    assert same_weights(trainer.model, alone.model)
    assert all("its announcement was refused" in reasons[HOSTILE] for reasons in rejected)
    expected = f"Client 'west' announced num_examples={HUGE}, but max_examples_per_client={NUM_EXAMPLES}"
    assert any("refused client 'west'" in text and expected in text for text in caplog.messages)
    assert not any("'west' joined" in text for text in caplog.messages)
    # The client does not learn the numbers of the other clients.
    assert "refused the announcement of client 'west'. The log of the server has the details" in str(errors[HOSTILE])


def test_agreed_number_does_not_change_a_byte_of_an_honest_run(tmp_path, alone):
    trainer, _ = run_with_threads(tmp_path, dict.fromkeys(HONEST, honest), {}, max_examples_per_client=NUM_EXAMPLES)
    assert same_weights(trainer.model, alone.model)


def test_client_that_lies_up_to_the_agreed_number_moves_the_model_by_its_share(tmp_path, alone):
    maximum, num_rounds, factor = 3 * NUM_EXAMPLES, 2, -25.0
    replies = {**dict.fromkeys(HONEST, honest), HOSTILE: claims(maximum, factor)}
    trainer, rejected = run_with_threads(
        tmp_path, replies, {HOSTILE: announces(maximum)}, max_examples_per_client=maximum
    )
    assert rejected == [{}, {}]
    share = maximum / (maximum + len(HONEST) * NUM_EXAMPLES)
    # The mean of the honest clients, moved by the share of the difference of both changes.
    moved = num_rounds * share * (factor - 1) * 0.01
    for (name, value), honest_value in zip(trainer.model.named_parameters(), alone.model.parameters(), strict=True):
        assert torch.allclose(value - honest_value, torch.full_like(value, moved), atol=1e-5), name


def test_change_above_the_ratio_to_other_clients_is_no_longer_part_of_the_share(tmp_path, alone):
    """The share times `max_update_ratio` bounds what a client with the largest agreed number can do."""
    maximum = 3 * NUM_EXAMPLES
    replies = {**dict.fromkeys(HONEST, honest), HOSTILE: claims(maximum, -100.0)}
    trainer, rejected = run_with_threads(
        tmp_path, replies, {HOSTILE: announces(maximum)}, max_examples_per_client=maximum
    )
    assert [list(reasons) for reasons in rejected] == [[HOSTILE], [HOSTILE]]
    assert same_weights(trainer.model, alone.model)


def test_client_that_joins_later_with_a_huge_number_is_refused(tmp_path, alone, caplog):
    has_started = threading.Event()
    errors: dict[str, Exception] = {}

    def waiting(request: Message) -> Message:
        """Reply in the first round when the late client was refused."""
        has_started.set()
        deadline = time.monotonic() + 10
        while HOSTILE not in errors and time.monotonic() < deadline:
            time.sleep(0.01)
        return honest(request)

    replies = {"north": honest, "south": waiting, HOSTILE: claims(HUGE)}
    trainer, rejected = run_with_threads(
        tmp_path, replies, {HOSTILE: announces(HUGE)}, errors, late={HOSTILE: has_started.wait}
    )
    assert "refused the announcement of client 'west'" in str(errors[HOSTILE])
    assert same_weights(trainer.model, alone.model)
    assert rejected[1] == {HOSTILE: "Client 'west', round 2: its announcement was refused"}
    expected = f"announced num_examples={HUGE}, which is more than 10 times the median of the other clients, 8. If the"
    assert any("refused client 'west'" in text and expected in text for text in caplog.messages)


def test_resumed_server_accepts_the_clients_that_the_checkpoint_accepted(tmp_path):
    """Only some of the clients return, and the median of their numbers is lower."""
    sizes = {"north": NUM_EXAMPLES, "south": NUM_EXAMPLES, "large": 9 * NUM_EXAMPLES, "tiny": 1}
    replies = {name: claims(size, 1.0) for name, size in sizes.items()}
    announced = {name: announces(size) for name, size in sizes.items()}
    run_with_threads(tmp_path, replies, announced)
    absent = dict.fromkeys(HONEST, threading.Event().wait)
    trainer, rejected = run_with_threads(
        tmp_path, replies, announced, late=absent, resume_from=tmp_path / "checkpoint-1"
    )
    assert trainer.state.global_step == 2 and [list(reasons) for reasons in rejected] == [["north", "south"]]
    packed = dataclasses.replace(announced["large"], num_encoded_examples=11 * NUM_EXAMPLES)
    with pytest.raises(AnnouncementError, match="'large' announced num_encoded_examples=88, .* other clients, 8"):
        run_with_threads(
            tmp_path, replies, {**announced, "large": packed}, late=absent, resume_from=tmp_path / "checkpoint-1"
        )
