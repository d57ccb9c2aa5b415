"""Tokens from hidden states: who finds what, and what may not be measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attacked import MODELS, rows, texts, tiny, word_tokenizer

from hf_federated.audits import (
    AuditConfig,
    LearnedDecoder,
    NearestState,
    PrefixSearch,
    TokenRows,
    build_head,
    drop_shared,
    encode_rows,
    invert,
    score,
    sent_states,
    strongest,
)
from hf_federated.audits.inversion import chance_recall, known_tokens
from hf_federated.split import SplitModel, Wire
from hf_federated.split.messages import Forward


ATTACKER, VICTIMS = rows(150, seed=1), rows(12, seed=2)
QUICK = AuditConfig(num_steps=60, batch_size=16, learning_rate=1e-2, num_candidates=8)


def recall(guessed: torch.Tensor, victims: TokenRows = VICTIMS) -> float:
    return float((guessed[:, :, 0] == victims.input_ids)[victims.scored].float().mean())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_is_attacked_is_what_a_server_receives(dtype):
    model = tiny()
    split = SplitModel.from_model(model, 2, 1, wire_dtype=dtype)
    heard: list[bytes] = []
    split.boundary.link.watch = lambda message, answer: heard.append(message)
    with torch.no_grad():
        split(VICTIMS.input_ids, attention_mask=VICTIMS.attention_mask)
    received = Wire(dtype).decode(Forward.from_bytes(heard[0]).hidden, len(VICTIMS), torch.float32)
    states = sent_states(build_head(model, 2), VICTIMS, Wire(dtype))
    assert torch.equal(states, received * VICTIMS.attention_mask[:, :, None])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_behind_the_embedding_the_nearest_state_is_every_token(name):
    head = build_head(tiny(name), 0)
    states = sent_states(head, VICTIMS, Wire("float32"))
    found = NearestState(head, VICTIMS.input_ids.shape[1]).propose(states, VICTIMS.attention_mask, 1)
    assert recall(found) == 1


def test_a_first_token_sees_itself_only_and_is_found_behind_any_block():
    head = build_head(tiny(), 2)
    states = sent_states(head, VICTIMS, Wire("float32"))
    found = NearestState(head, VICTIMS.input_ids.shape[1]).propose(states, VICTIMS.attention_mask, 1)
    assert torch.equal(found[:, 0, 0], VICTIMS.input_ids[:, 0])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_search_over_the_vocabulary_finds_every_token_behind_blocks(name):
    head = build_head(tiny(name), 2)
    states = sent_states(head, VICTIMS, Wire("float32"))
    nearest = NearestState(head, VICTIMS.input_ids.shape[1])
    search = PrefixSearch(head, [nearest], num_candidates=1000, batch_size=5)
    assert recall(search.propose(states, VICTIMS.attention_mask)) == 1
    assert recall(nearest.propose(states, VICTIMS.attention_mask, 1)) < 1


@pytest.mark.parametrize("contextual", [False, True])
def test_a_decoder_learns_from_the_attackers_rows_and_reads_others(contextual):
    head = build_head(tiny(), 1)
    own, theirs = (sent_states(head, some, Wire("float32")) for some in (ATTACKER, VICTIMS))
    embedding = head.model.get_input_embeddings().weight
    decoder = LearnedDecoder(embedding, own, ATTACKER, QUICK, contextual)
    found = recall(decoder.propose(theirs, VICTIMS.attention_mask, 1))
    assert found > 0.4
    # What stands behind the end of a row changes nothing.
    noise = torch.cat([theirs, torch.full((len(theirs), 3, theirs.shape[2]), 9.0)], 1)
    mask = torch.nn.functional.pad(VICTIMS.attention_mask, (0, 3))
    assert recall(decoder.propose(noise, mask, 1)[:, :-3]) == pytest.approx(found)
    again = LearnedDecoder(embedding, own, ATTACKER, QUICK, contextual)
    assert all(map(torch.equal, decoder.state_dict().values(), again.state_dict().values()))


def test_a_decoder_of_shuffled_targets_reads_no_more_than_chance():
    head = build_head(tiny(), 1)
    own, theirs = (sent_states(head, some, Wire("float32")) for some in (ATTACKER, VICTIMS))
    shuffled = ATTACKER.input_ids.clone()
    places = ATTACKER.attention_mask.bool()
    tokens = shuffled[places]
    shuffled[places] = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
    wrong = dataclasses.replace(ATTACKER, input_ids=shuffled)
    decoder = LearnedDecoder(head.model.get_input_embeddings().weight, own, wrong, QUICK)
    # Chance is one word of 60; a decoder of the true targets reads half of them.
    assert recall(decoder.propose(theirs, VICTIMS.attention_mask, 1)) < 0.1


def test_negatives_are_drawn_where_the_vocabulary_is_larger():
    head = build_head(tiny(), 1)
    own, theirs = (sent_states(head, some, Wire("float32")) for some in (ATTACKER, VICTIMS))
    few = dataclasses.replace(QUICK, num_negatives=10)
    decoder = LearnedDecoder(head.model.get_input_embeddings().weight, own, ATTACKER, few)
    assert recall(decoder.propose(theirs, VICTIMS.attention_mask, 1)) > 0.4


def test_every_cut_is_attacked_and_the_strongest_attacker_counts():
    config = dataclasses.replace(QUICK, head_blocks=[0, 2], wire_dtypes=["float32", "int8"], num_candidates=63)
    seen = []
    found = invert(tiny(), word_tokenizer(), ATTACKER, VICTIMS, config, on_result=seen.append)
    assert found == seen
    assert [(one.head_blocks, one.wire_dtype, one.attacker) for one in found] == [
        (depth, dtype, name)
        for depth in (0, 2)
        for dtype in ("float32", "int8")
        for name in ("nearest", "decoder", "search")
    ]
    assert found[0].token_recall == found[0].rougeL == found[0].bleu4 == 1
    assert strongest(found, 2, "float32").token_recall == 1
    assert strongest(found, 2, "float32").attacker == "search"
    with pytest.raises(ValueError, match="after 1 blocks with float32 on the wire was not measured"):
        strongest(found, 1, "float32")


def test_a_victims_own_head_is_harder_to_read():
    victim = tiny()
    with torch.no_grad():
        for parameter in victim.model.layers[0].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.3)
    config = dataclasses.replace(QUICK, head_blocks=[1], attackers=["nearest", "search"])
    shared, own = (
        strongest(invert(tiny(), word_tokenizer(), ATTACKER, VICTIMS, config, other), 1, "float32").token_recall
        for other in (None, victim)
    )
    assert own < shared


def test_victims_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="The victims' model has .* of shape none, the attacker's"):
        invert(tiny(), word_tokenizer(), ATTACKER, VICTIMS, dataclasses.replace(QUICK, head_blocks=[1]), tiny("gpt2"))


def test_scores_leave_out_what_a_tokenizer_puts_around_a_text():
    guessed = VICTIMS.input_ids.clone()
    guessed[:, 0] = 5
    assert score(word_tokenizer(), guessed, VICTIMS)["token_recall"] == 1
    guessed[VICTIMS.scored] = 5
    scores = score(word_tokenizer(), guessed, VICTIMS)
    expected = float((VICTIMS.input_ids[VICTIMS.scored] == 5).float().mean())
    assert scores["token_recall"] == pytest.approx(expected) and scores["bleu4"] == 0


def test_chance_and_known_tokens_are_shares_of_the_victims_tokens():
    # The attacker's most frequent token, and not the victims'.
    own = encode_rows(["word2 word2 word1"], word_tokenizer(), 12)
    theirs = encode_rows(["word1 word3", "word2 word4 word1"], word_tokenizer(), 12)
    assert chance_recall(own, theirs) == pytest.approx(1 / 5)
    assert known_tokens(own, theirs) == pytest.approx(3 / 5)


def test_victims_rows_that_the_attacker_has_are_dropped_and_counted():
    own = ["word1 word2 word3", "word4 word5"]
    theirs = ["WORD4  word5", "word6", "word6", "word1 word2 word9", "word7", "word8"]
    # With three tokens, of which one is the start, a row ends after two words.
    kept, num_dropped = drop_shared(own, theirs, word_tokenizer(), max_length=3)
    assert (kept, num_dropped) == (["word6", "word7", "word8"], 3)
    assert drop_shared(own, theirs, word_tokenizer(), max_length=12, most=2) == (["word6", "word1 word2 word9"], 2)


def test_a_row_on_both_sides_is_refused():
    both = encode_rows([*texts(5, seed=1)[:1], "word1 word1"], word_tokenizer(), 12)
    with pytest.raises(ValueError, match="1 of the victims' rows are the attacker's too"):
        invert(tiny(), word_tokenizer(), rows(5, seed=1), both, QUICK)


def test_a_cut_deeper_than_the_model_is_refused():
    with pytest.raises(ValueError, match="A model of 4 blocks cannot leave 4 [+] 1 with the client"):
        invert(tiny(), word_tokenizer(), ATTACKER, VICTIMS, dataclasses.replace(QUICK, head_blocks=[0, 4]))


def test_classes_whose_blocks_have_no_cache_are_refused():
    model = tiny()
    model.config.model_type = "chatglm"
    with pytest.raises(ValueError, match="run without a cache and are not audited"):
        build_head(model, 1)


def test_texts_without_a_token_are_refused():
    with pytest.raises(ValueError, match="None of the 2 texts has a token"):
        encode_rows(["", " "], word_tokenizer(), 12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_blocks": []}, "head_blocks must name at least one"),
        ({"head_blocks": [1, 1]}, "each once"),
        ({"head_blocks": [-1]}, "head_blocks must not be negative"),
        ({"attackers": ["oracle"]}, "attackers may be nearest, decoder, transformer, search; got oracle"),
        ({"attackers": ["search"]}, "checks what others propose"),
        ({"wire_dtypes": ["int4"]}, "wire_dtypes may be .*; got int4"),
        ({"num_attacker_rows": 0}, "num_attacker_rows must be at least 1"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"gradient_rows": -1}, "gradient_rows must not be negative"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
    ],
)
def test_settings_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        AuditConfig(**values)
