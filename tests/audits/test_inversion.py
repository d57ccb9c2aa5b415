"""Recovery of tokens from hidden states: results of each attacker, and inputs that raise an error."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from audit_inputs import MODELS, examples, texts, tiny, word_tokenizer

from hf_federated.audits import (
    AuditConfig,
    LearnedDecoder,
    NearestState,
    PrefixSearch,
    TokenizedExamples,
    build_head,
    encode_examples,
    invert,
    remove_shared_texts,
    score,
    sent_states,
    strongest,
)
from hf_federated.audits.inversion import chance_recall, known_tokens
from hf_federated.split import SplitModel, Wire
from hf_federated.split.messages import Forward


ATTACKER, VICTIMS = examples(150, seed=1), examples(12, seed=2)
QUICK = AuditConfig(num_steps=60, batch_size=16, learning_rate=1e-2, num_candidates=8)


def recall(guessed: torch.Tensor, victims: TokenizedExamples = VICTIMS) -> float:
    return float((guessed[:, :, 0] == victims.input_ids)[victims.scored].float().mean())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_attacked_states_equal_the_states_that_a_server_receives(dtype):
    model = tiny()
    split = SplitModel.from_model(model, 2, 1, wire_dtype=dtype)
    messages: list[bytes] = []
    split.boundary.link.watch = lambda request, reply: messages.append(request)
    with torch.no_grad():
        split(VICTIMS.input_ids, attention_mask=VICTIMS.attention_mask)
    states = sent_states(build_head(model, 2), VICTIMS, Wire(dtype))
    received = Wire(dtype).decode(Forward.from_bytes(messages[0]).hidden, {"hidden": states})["hidden"]
    assert torch.equal(states, received * VICTIMS.attention_mask[:, :, None])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_nearest_state_recovers_every_token_without_blocks_before_the_cut(name):
    head = build_head(tiny(name), 0)
    states = sent_states(head, VICTIMS, Wire("float32"))
    found = NearestState(head, VICTIMS.input_ids.shape[1]).propose(states, VICTIMS.attention_mask, 1)
    assert recall(found) == 1


def test_nearest_state_recovers_first_tokens_after_any_number_of_blocks():
    """A first token attends to itself only, so its hidden state has no other context."""
    head = build_head(tiny(), 2)
    states = sent_states(head, VICTIMS, Wire("float32"))
    found = NearestState(head, VICTIMS.input_ids.shape[1]).propose(states, VICTIMS.attention_mask, 1)
    assert torch.equal(found[:, 0, 0], VICTIMS.input_ids[:, 0])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_search_over_the_vocabulary_recovers_every_token_after_two_blocks(name):
    head = build_head(tiny(name), 2)
    states = sent_states(head, VICTIMS, Wire("float32"))
    nearest = NearestState(head, VICTIMS.input_ids.shape[1])
    search = PrefixSearch(head, [nearest], num_candidates=1000, batch_size=5)
    assert recall(search.propose(states, VICTIMS.attention_mask)) == 1
    assert recall(nearest.propose(states, VICTIMS.attention_mask, 1)) < 1


@pytest.mark.parametrize("contextual", [False, True])
def test_decoder_generalizes_to_victims_and_is_reproducible(contextual):
    head = build_head(tiny(), 1)
    attacker_states, victim_states = (sent_states(head, examples, Wire("float32")) for examples in (ATTACKER, VICTIMS))
    embedding = head.model.get_input_embeddings().weight
    decoder = LearnedDecoder(embedding, attacker_states, ATTACKER, QUICK, contextual)
    baseline = recall(decoder.propose(victim_states, VICTIMS.attention_mask, 1))
    assert baseline > 0.4
    # Padding after the end of an example changes nothing.
    padding = torch.full((len(victim_states), 3, victim_states.shape[2]), 9.0)
    padded = torch.cat([victim_states, padding], 1)
    mask = torch.nn.functional.pad(VICTIMS.attention_mask, (0, 3))
    assert recall(decoder.propose(padded, mask, 1)[:, :-3]) == pytest.approx(baseline)
    again = LearnedDecoder(embedding, attacker_states, ATTACKER, QUICK, contextual)
    assert all(map(torch.equal, decoder.state_dict().values(), again.state_dict().values()))


def test_decoder_trained_on_shuffled_targets_recovers_no_more_than_chance():
    head = build_head(tiny(), 1)
    attacker_states, victim_states = (sent_states(head, examples, Wire("float32")) for examples in (ATTACKER, VICTIMS))
    shuffled = ATTACKER.input_ids.clone()
    mask = ATTACKER.attention_mask.bool()
    tokens = shuffled[mask]
    shuffled[mask] = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
    wrong = dataclasses.replace(ATTACKER, input_ids=shuffled)
    decoder = LearnedDecoder(head.model.get_input_embeddings().weight, attacker_states, wrong, QUICK)
    # Chance is one of 60 words. A decoder trained on the true targets recovers half of the tokens.
    assert recall(decoder.propose(victim_states, VICTIMS.attention_mask, 1)) < 0.1


def test_decoder_with_fewer_negatives_than_the_vocabulary():
    head = build_head(tiny(), 1)
    attacker_states, victim_states = (sent_states(head, examples, Wire("float32")) for examples in (ATTACKER, VICTIMS))
    few = dataclasses.replace(QUICK, num_negatives=10)
    decoder = LearnedDecoder(head.model.get_input_embeddings().weight, attacker_states, ATTACKER, few)
    assert recall(decoder.propose(victim_states, VICTIMS.attention_mask, 1)) > 0.4


def test_every_cut_is_attacked_and_strongest_returns_the_highest_recall():
    config = dataclasses.replace(QUICK, head_blocks=[0, 2], wire_dtypes=["float32", "int8"], num_candidates=63)
    reported = []
    results = invert(tiny(), word_tokenizer(), ATTACKER, VICTIMS, config, on_result=reported.append)
    assert results == reported
    assert [(result.head_blocks, result.wire_dtype, result.attacker) for result in results] == [
        (depth, dtype, name)
        for depth in (0, 2)
        for dtype in ("float32", "int8")
        for name in ("nearest", "decoder", "search")
    ]
    assert results[0].token_recall == results[0].rougeL == results[0].bleu4 == 1
    assert strongest(results, 2, "float32").token_recall == 1
    assert strongest(results, 2, "float32").attacker == "search"
    with pytest.raises(ValueError, match="did not measure the cut after 1 blocks with wire dtype float32"):
        strongest(results, 1, "float32")


def test_changed_victim_head_lowers_recall():
    victim = tiny()
    with torch.no_grad():
        for parameter in victim.model.layers[0].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.3)
    config = dataclasses.replace(QUICK, head_blocks=[1], attackers=["nearest", "search"])
    shared, changed = (
        strongest(invert(tiny(), word_tokenizer(), ATTACKER, VICTIMS, config, victim_model), 1, "float32").token_recall
        for victim_model in (None, victim)
    )
    assert changed < shared


def test_victim_model_with_another_architecture_raises():
    with pytest.raises(ValueError, match="has shape none in the victims' model, but .* in the attacker's model"):
        invert(tiny(), word_tokenizer(), ATTACKER, VICTIMS, dataclasses.replace(QUICK, head_blocks=[1]), tiny("gpt2"))


def test_scores_ignore_special_tokens():
    guessed = VICTIMS.input_ids.clone()
    guessed[:, 0] = 5
    assert score(word_tokenizer(), guessed, VICTIMS)["token_recall"] == 1
    guessed[VICTIMS.scored] = 5
    scores = score(word_tokenizer(), guessed, VICTIMS)
    expected = float((VICTIMS.input_ids[VICTIMS.scored] == 5).float().mean())
    assert scores["token_recall"] == pytest.approx(expected) and scores["bleu4"] == 0


def test_chance_and_known_tokens_are_fractions_of_the_victims_tokens():
    # word2 is the most frequent token of the attacker, but not of the victims.
    attacker = encode_examples(["word2 word2 word1"], word_tokenizer(), 12)
    victims = encode_examples(["word1 word3", "word2 word4 word1"], word_tokenizer(), 12)
    assert chance_recall(attacker, victims) == pytest.approx(1 / 5)
    assert known_tokens(attacker, victims) == pytest.approx(3 / 5)


def test_shared_and_duplicate_texts_are_removed_and_counted():
    attacker = ["word1 word2 word3", "word4 word5"]
    victims = ["WORD4  word5", "word6", "word6", "word1 word2 word9", "word7", "word8"]
    # With three tokens, including the start token, an example ends after two words.
    kept, num_removed = remove_shared_texts(attacker, victims, word_tokenizer(), max_length=3)
    assert (kept, num_removed) == (["word6", "word7", "word8"], 3)
    assert remove_shared_texts(attacker, victims, word_tokenizer(), max_length=12, max_texts=2) == (
        ["word6", "word1 word2 word9"],
        2,
    )


def test_example_of_attacker_and_victim_raises():
    both = encode_examples([*texts(5, seed=1)[:1], "word1 word1"], word_tokenizer(), 12)
    with pytest.raises(ValueError, match="1 of the victims' examples are also examples of the attacker"):
        invert(tiny(), word_tokenizer(), examples(5, seed=1), both, QUICK)


def test_cut_deeper_than_the_model_raises():
    with pytest.raises(ValueError, match="head_blocks=4 and tail_blocks=1 leave no block for the server"):
        invert(tiny(), word_tokenizer(), ATTACKER, VICTIMS, dataclasses.replace(QUICK, head_blocks=[0, 4]))


def test_texts_without_a_token_raise():
    with pytest.raises(ValueError, match="All 2 texts are empty after tokenization"):
        encode_examples(["", " "], word_tokenizer(), 12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_blocks": []}, r"head_blocks=\[\] is not allowed. Set it to a non-empty list"),
        ({"head_blocks": [1, 1]}, "without duplicates"),
        ({"head_blocks": [-1]}, "head_blocks contains -1. Set all its values to at least 0"),
        ({"attackers": ["oracle"]}, "unknown values: oracle. Choose from nearest, decoder, transformer, search"),
        ({"attackers": ["search"]}, "has no proposals to check"),
        ({"wire_dtypes": ["int2"]}, "wire_dtypes contains unknown values: int2"),
        ({"num_attacker_rows": 0}, "num_attacker_rows=0 is too small. Set it to at least 1"),
        ({"num_steps": 0}, "num_steps=0 is too small. Set it to at least 1"),
        ({"max_length": 1}, "max_length=1 is too small. Set it to at least 2"),
        ({"gradient_rows": -1}, "gradient_rows=-1 is too small. Set it to at least 0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 is not positive"),
    ],
)
def test_settings_out_of_range_raise(values, message):
    with pytest.raises(ValueError, match=message):
        AuditConfig(**values)
