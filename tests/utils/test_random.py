"""Tests of the global random generators: a restored state gives the numbers that would have followed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hf_federated.utils.random import (
    are_equal_states,
    generator_states,
    preserved_generators,
    seed_generators,
    set_generator_states,
)


def draw() -> list[float]:
    """Draw from each generator. numpy and Python keep the second number of a pair of normal numbers."""
    return [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), float(torch.randn(()))]


@pytest.mark.parametrize("num_drawn", [0, 1, 2, 700])
def test_numbers_after_a_block_are_those_without_the_block(num_drawn):
    """After one normal number, numpy has a second one; after 624 numbers, it has computed new state."""
    with preserved_generators():
        seed_generators(3)
        for _ in range(num_drawn):
            draw()
        expected_state = generator_states()
        expected = [draw() for _ in range(3)]
        set_generator_states(expected_state)
        with preserved_generators():
            seed_generators(4)
            draw()
        assert are_equal_states(generator_states(), expected_state)
        assert [draw() for _ in range(3)] == expected


def test_state_can_be_restored_twice():
    with preserved_generators():
        states = generator_states()
        first = draw()
        set_generator_states(states)
        second = draw()
        set_generator_states(states)
        assert first == second == draw()
