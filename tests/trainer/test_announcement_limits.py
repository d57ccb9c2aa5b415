"""Which numbers of examples the clients on other machines may announce, and which of them are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from federations import setup_of
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedConfig, FederatedTrainer, NetworkEngine
from hf_federated.messages import Announcement
from hf_federated.trainer.announcement_limits import AnnouncementError, AnnouncementLimits, agreed_problem


def announced(number: int | None, **fields: Any) -> Announcement:
    return Announcement(**{**dict.fromkeys(("num_examples", "num_encoded_examples"), number), **OTHERS, **fields})


OTHERS = {"num_eval_examples": 4, "examples_per_step": 4}
FOUR = ("north", "south", "east", "west")


@pytest.fixture
def limits(tmp_path):
    """Build the limits of a server with the given clients and fields of the configuration."""

    def build(*clients: str, **federation: Any) -> AnnouncementLimits:
        trainer = FederatedTrainer(
            model=tiny_model(),
            args=arguments(tmp_path),
            eval_dataset=rows(4),
            engine=NetworkEngine(clients or FOUR, address="127.0.0.1:0", insecure=True),
            federation=FederatedConfig(num_rounds=1, **federation),
        )
        return AnnouncementLimits(setup_of(trainer))

    return build


def test_huge_number_is_refused_at_the_start_with_the_field_and_the_value_that_allow_it(limits):
    numbers = {"north": announced(80), "south": announced(100), "east": announced(120), "west": announced(10**12)}
    with pytest.raises(AnnouncementError) as error:
        limits().start(numbers)
    assert str(error.value) == (
        "Client 'west' announced num_examples=1000000000000, which is more than 10 times the median of the other "
        "clients, 100. If the number is right, set max_examples_per_client=1000000000000 in the FederatedConfig of "
        "all parties. Otherwise, run without this client."
    )


def test_honest_client_with_twenty_times_the_examples_starts_with_the_named_value(limits):
    numbers = {"north": announced(100), "south": announced(100), "east": announced(2000, num_encoded_examples=2500)}
    with pytest.raises(AnnouncementError, match="max_examples_per_client=2500 in") as error:
        limits("north", "south", "east").start(numbers)
    assert "\n" not in str(error.value)
    allowed = limits("north", "south", "east", max_examples_per_client=2500)
    assert not any(allowed.refused(numbers, name) for name in numbers)
    allowed.start(numbers)


def test_ten_times_the_median_of_the_other_clients_is_accepted(limits):
    sizes = {"north": 1, "south": 100, "east": 100, "west": 1000}
    limits().start({name: announced(size) for name, size in sizes.items()})


def test_federation_of_two_clients_compares_no_numbers(limits):
    limits("north", "south").start({"north": announced(1), "south": announced(10**6)})


def test_two_clients_that_start_a_larger_federation_are_compared(limits):
    with pytest.raises(AnnouncementError, match=r"Client 'south' announced num_examples=1000000000000"):
        limits().start({"north": announced(100), "south": announced(10**12)})


LARGE = 10**6


@pytest.mark.parametrize(
    ("federation", "fields", "expected"),
    [
        ({}, {"num_encoded_examples": LARGE}, "num_encoded_examples=1000000"),
        ({"evaluate_clients": True}, {"num_eval_examples": LARGE}, "num_eval_examples=1000000"),
        (
            {"local_steps": 2, "aggregation_kwargs": {"weighting": "tokens"}},
            {"examples_per_step": LARGE},
            "examples_per_step=1000000, and thereby 2000000 examples in local_steps=2",
        ),
        (
            {"local_steps": 2},
            {"num_examples": None, "num_encoded_examples": None, "examples_per_step": LARGE},
            "examples_per_step=1000000 of a stream, and thereby up to 4000000 examples in local_steps=2",
        ),
    ],
    ids=["encoded", "evaluation", "tokens", "stream"],
)
@pytest.mark.parametrize("agreed", [None, 100])
def test_each_announced_number_that_becomes_a_weight_is_limited(limits, federation, fields, expected, agreed):
    honest = announced(100)
    numbers = {"north": honest, "south": honest, "east": honest, "west": dataclasses.replace(honest, **fields)}
    if agreed is None:
        with pytest.raises(AnnouncementError) as error:
            limits(**federation).start(numbers)
        assert f"Client 'west' announced {expected}, which is more than 10 times" in str(error.value)
    else:
        refused = limits(**federation, max_examples_per_client=agreed).refused(numbers, "west")
        assert (
            list(refused) == ["west"] and f"announced {expected}, but max_examples_per_client=100" in refused["west"]
        )


@pytest.mark.parametrize(
    "federation",
    [{"max_rows_per_round": 50}, {"balance": "min"}, {"local_steps": 2}],
    ids=["limit of a round", "balance", "batch with local steps"],
)
def test_number_that_becomes_no_weight_is_not_compared(limits, federation):
    """The examples of a round limit the weights. A large batch is no weight if examples are counted."""
    honest = announced(100)
    large = announced(100 if "local_steps" in federation else 10**6, examples_per_step=10**4, num_eval_examples=10**6)
    limits(**federation).start({"north": honest, "south": honest, "east": honest, "west": large})


def test_balance_of_single_cohorts_does_not_limit_the_weights_of_a_buffer(limits):
    buffered = limits(balance="min", collector="fedbuff", collector_kwargs={"buffer_size": 2})
    with pytest.raises(AnnouncementError, match="num_examples=100000"):
        buffered.start({"north": announced(10), "south": announced(10), "east": announced(10**5)})


def test_clients_without_evaluation_examples_do_not_lower_the_median(limits):
    one, none = announced(100, num_eval_examples=9), announced(100, num_eval_examples=0)
    limits(evaluate_clients=True).start({"north": none, "south": none, "east": one, "west": one})


def test_client_that_joins_later_is_compared_and_excludes_no_accepted_client(limits):
    found = limits()
    start = {"north": announced(200), "south": announced(10), "east": announced(100)}
    found.start(start)
    small = {**start, "west": announced(1)}
    assert found.refused(small, "west") == {}
    late = limits()
    late.start(start)
    large = {**start, "west": announced(1001)}
    refused = late.refused(large, "west")
    assert list(refused) == ["west"] and "announced num_examples=1001" in refused["west"]
    assert (
        "median of the other clients, 100. If the number is right, set max_examples_per_client=1001" in refused["west"]
    )


def test_first_client_is_compared_when_two_others_have_joined(limits):
    found = limits()
    first = {"north": announced(10**12)}
    found.start(first)
    second = {**first, "south": announced(100)}
    assert found.refused(second, "south") == {}
    refused = found.refused({**second, "east": announced(100)}, "east")
    assert list(refused) == ["north"] and "num_examples=1000000000000" in refused["north"]


def test_resumed_run_accepts_the_clients_of_its_checkpoint(limits):
    """The clients that have joined when a run resumes may have another median."""
    all_numbers = {"north": announced(1000), "south": announced(150), "east": announced(150), "west": announced(150)}
    before = limits(*FOUR, "a", "b")
    before.start({**all_numbers, "a": announced(20), "b": announced(20)})
    resumed = limits(*FOUR, "a", "b")
    resumed.load_state_dict(before.state_dict())
    resumed.start({"north": announced(1000), "a": announced(20), "b": announced(20)})
    changed = limits(*FOUR, "a", "b")
    changed.load_state_dict(before.state_dict())
    with pytest.raises(AnnouncementError, match="num_examples=2000"):
        changed.start({"north": announced(2000), "a": announced(20), "b": announced(20)})


COUNTS = {"north": 100, "south": 5000, "east": 100}


@pytest.mark.parametrize(
    ("client_id", "number", "expected"),
    [
        ("north", 101, "announced num_examples=101, but max_examples_per_client lists 100 examples of the client"),
        ("north", None, "announced a stream, but max_examples_per_client lists 100 examples"),
        ("west", 1, "announced num_examples=1, but max_examples_per_client does not list the client"),
    ],
)
def test_listed_numbers_limit_each_client(limits, client_id, number, expected):
    found = limits(max_examples_per_client=COUNTS, local_steps=1)
    assert expected in found.refused({client_id: announced(number)}, client_id)[client_id]


def test_listed_numbers_allow_any_ratio_between_clients(limits):
    found, numbers = limits(max_examples_per_client=COUNTS), {name: announced(size) for name, size in COUNTS.items()}
    assert not any(found.refused(numbers, name) for name in numbers)
    found.start(numbers)
    packed = {**numbers, "east": announced(100, num_encoded_examples=2000)}
    with pytest.raises(AnnouncementError, match="num_encoded_examples=2000 for num_examples=100, a ratio of 20"):
        limits(max_examples_per_client=COUNTS).start(packed)


def test_client_compares_its_own_number_before_it_connects(tmp_path):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"north": rows(6)},
        federation=FederatedConfig(num_rounds=1, max_examples_per_client=5),
    )
    with pytest.raises(
        AnnouncementError, match="Client 'north' announced num_examples=6, but .*_client=5. .* least 6"
    ):
        trainer.join("127.0.0.1:1", client_id="north", insecure=True, connect_timeout=0.1)
    assert agreed_problem(setup_of(trainer), "north", announced(5)) is None


def test_clients_of_one_process_announce_nothing(tmp_path):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(1), "b": rows(1), "c": rows(40)},
        federation=FederatedConfig(num_rounds=1, max_examples_per_client=2),
    )
    trainer.train()
    assert trainer.state.global_step == 1
