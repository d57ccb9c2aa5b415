"""The audit of ChatGLM's model classes, whose blocks run outside of the model class, with slow tokenizers."""

from __future__ import annotations

import pytest
import torch
from chatglm_layouts import chatglm
from chatglm_repository import write_repository
from datasets import Dataset

from hf_federated.audits import (
    AuditConfig,
    LeakageAudit,
    NearestState,
    PrefixSearch,
    TokenizedExamples,
    attack_targets,
    build_head,
    encode_examples,
    sent_states,
)
from hf_federated.audits.embedding_gradients import attack_embedding
from hf_federated.audits.part_inputs import text_states
from hf_federated.cli.main import main
from hf_federated.split import SplitModel, Wire
from hf_federated.split.messages import Forward
from hf_federated.utils.remote_code import load_repository_tokenizer


GENERATIONS = pytest.mark.parametrize("generation", [1, 2])


def model_of(generation: int) -> torch.nn.Module:
    """A model with weights that are large enough for its blocks to change the order of nearest states."""
    model = chatglm(generation)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


def random_examples(generation: int, num_examples: int = 6) -> TokenizedExamples:
    """Texts of four to nine tokens. In the first generation 37 and 38 follow a text."""
    end = [37, 38] if generation == 1 else []
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 10, (num_examples,), generator=generator).tolist()
    rows = [[*torch.randint(4, 36, (length,), generator=generator).tolist(), *end] for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]).long()
    return TokenizedExamples(ids, mask, (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]))


def recall(found: torch.Tensor, victims: TokenizedExamples) -> float:
    return float((found[:, :, 0] == victims.input_ids)[victims.scored].float().mean())


@GENERATIONS
def test_attacked_states_equal_the_states_that_a_server_receives(generation):
    model, victims = model_of(generation), random_examples(generation, 1)
    split = SplitModel.from_model(model, 2, 1)
    messages: list[bytes] = []
    split.boundary.link.watch = lambda request, reply: messages.append(request)
    with torch.no_grad():
        split(victims.input_ids)
    states = sent_states(build_head(model, 2), victims, Wire("float32"))
    received = Wire("float32").decode(Forward.from_bytes(messages[0]).hidden, {"hidden": states})["hidden"]
    assert torch.equal(states, received)


@GENERATIONS
def test_nearest_state_recovers_every_token_without_blocks_before_the_cut(generation):
    head, victims = build_head(model_of(generation), 0), random_examples(generation)
    states = sent_states(head, victims, Wire("float32"))
    found = NearestState(head, victims.input_ids.shape[1]).propose(states, victims.attention_mask, 1)
    assert recall(found, victims) == 1


@pytest.mark.parametrize(("generation", "blocks"), [(1, 1), (2, 2)])
def test_search_recovers_more_tokens_than_nearest_states(generation, blocks):
    """A search from left to right is complete. In a context that attends in both directions the search is greedy."""
    head, victims = build_head(model_of(generation), blocks), random_examples(generation)
    states = sent_states(head, victims, Wire("float32"))
    nearest = NearestState(head, victims.input_ids.shape[1])
    search = PrefixSearch(head, [nearest], num_candidates=40, batch_size=3)
    found = search.propose(states, victims.attention_mask)
    first = recall(nearest.propose(states, victims.attention_mask, 1), victims)
    assert recall(found, victims) == 1 if generation == 2 else recall(found, victims) > 1.5 * first
    # The search minimizes the distance to the received states.
    if generation == 1:
        length = int(victims.attention_mask[0].sum()) - 2
        tokens = [found[0, :length, 0], nearest.propose(states, victims.attention_mask, 1)[0, :length, 0]]
        distances = [(text_states(head, row[None])[0] - states[0, :length]).square().sum().item() for row in tokens]
        assert distances[0] < distances[1]


@GENERATIONS
@pytest.mark.parametrize("tail_blocks", [1, 2])
@pytest.mark.sampled(2)
def test_all_targets_are_recovered_from_any_tail(generation, tail_blocks):
    victims = random_examples(generation)
    num_tokens = int(victims.scored.sum())
    # In the first generation every token of the text is a target, because a start token precedes the text.
    for targets, expected in (("last", 6), ("all", num_tokens if generation == 1 else num_tokens - 6)):
        recovery = attack_targets(model_of(generation), victims, tail_blocks, "float32", targets)
        assert recovery.num_targets == expected
        assert (recovery.token_recall, recovery.position_precision, recovery.position_recall) == (1, 1, 1), targets


def test_gradient_of_the_embedding_names_the_tokens_of_a_prefix_language_model():
    results = attack_embedding(model_of(1), random_examples(1), 2)
    assert {(result.source, result.rule) for result in results} == {("gradient", "nonzero"), ("adamw", "nonzero")}
    assert all(result.precision == 1 and result.recall > 0.7 for result in results)


def test_slow_tokenizer_is_truncated_before_its_special_tokens(tmp_path):
    name = str(write_repository(tmp_path, 1, ["a warm film in Paris", "yes no Rome"] * 8))
    tokenizer = load_repository_tokenizer(name, trust_remote_code=True)
    end = [tokenizer.convert_tokens_to_ids("[gMASK]"), tokenizer.bos_token_id]
    examples = encode_examples(["a warm film in Paris", "yes"], tokenizer, 6)
    for ids, mask, scored in zip(examples.input_ids, examples.attention_mask, examples.scored, strict=True):
        row = ids[mask.bool()].tolist()
        assert row[-2:] == end and len(row) <= 6 and scored.sum() == len(row) - 2
        assert tokenizer.decode(ids[scored].tolist()).strip() in "a warm film in Paris yes"


@pytest.mark.parametrize("generation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_command_audits_code_of_a_repository_only_if_permitted(generation, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [f"{'aeioubcdf'[number]} warm film in Paris" for number in range(9)]
    Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "rows" / "train.parquet")
    write_repository(tmp_path / "model", generation, texts * 3)
    command = "audit model rows --output-dir out --head-blocks 0 1 --num-attacker-rows 4 --num-victim-rows 3".split()
    command += "--max-length 12 --gradient-rows 2 --target-rows 2 --num-candidates 4 --num-steps 3".split()
    assert main(command) == 2
    assert "trust_remote_code" in capsys.readouterr().err
    assert main([*command, "--trust-remote-code"]) == 0
    audit = LeakageAudit.load(tmp_path / "out" / "audit.json")
    assert audit.strongest(head_blocks=0).token_recall == 1 and len(audit.targets) == 2
    assert audit.config == AuditConfig(**vars(audit.config))
