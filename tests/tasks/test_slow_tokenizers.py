"""Tasks for causal models encode texts with slow tokenizers as with fast ones, and keep the tokenizer's own tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from causal import bytes_tokenizer, pieces_tokenizer
from chatglm_repository import write_repository
from datasets import Dataset, concatenate_datasets
from superglue_raw import files
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_federated.tasks import Summarization, SuperGlueCloze, superglue_cloze_rows
from hf_federated.tasks.causal import CausalCollator, special_tokens, tokenize_texts
from hf_federated.tasks.superglue import LABELS
from hf_federated.utils.remote_code import load_causal_model, load_repository_tokenizer


ROWS = concatenate_datasets([superglue_cloze_rows(name, files(name)) for name in LABELS])
TEXTS = [*ROWS["source"], "yes no maybe 你好", "a warm film in Paris\nTL;DR: Rome"] * 3
PIECES = ["a warm film", " in Paris.", "你好", "ö", " ", "\n", '"it"', " — x", "ﬁ", " Rome", "é", "'s"]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[int, Path]:
    """Model repositories of both generations of ChatGLM."""
    folder = tmp_path_factory.mktemp("chatglm")
    return {generation: write_repository(folder / str(generation), generation, TEXTS) for generation in (1, 2)}


def chatglm_tokenizer(repositories: dict[int, Path], generation: int) -> Any:
    return load_repository_tokenizer(str(repositories[generation]), trust_remote_code=True)


def fast_twin(slow: Any) -> PreTrainedTokenizerFast:
    """A fast tokenizer with the vocabulary and the special tokens of a slow tokenizer of the second generation."""
    pieces = slow.vocabulary.pieces
    scores = [(pieces.id_to_piece(number), pieces.get_score(number)) for number in range(pieces.vocab_size())]
    further = [(token, 0.0) for token in slow.vocabulary.further]
    tokenizer = Tokenizer(Unigram([*scores, *further], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    tokens = [(token, slow.vocabulary.number(token)) for token in ("[gMASK]", "sop")]
    tokenizer.post_processor = TemplateProcessing(single="[gMASK] sop $A", special_tokens=tokens)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<unk>")


def encoded_or_error(task: Any, batch: Any, tokenizer: Any) -> Any:
    try:
        return task.encode(batch, tokenizer)
    except ValueError as error:
        return str(error)


def random_batches(num_batches: int) -> list[dict[str, list[str]]]:
    draw = random.Random(0)
    sources = [f"a{''.join(draw.choices(PIECES, k=draw.randint(1, 25)))}s" for _ in range(num_batches)]
    return [{"source": [source], "target": [draw.choice(["Rome", "你好 x", "ö", "it.", "ﬁ"])]} for source in sources]


@pytest.mark.parametrize("drops_spaces", [False, True])
def test_slow_and_fast_tokenizer_encode_summaries_equally(repositories, drops_spaces):
    """The slow tokenizers of `transformers` drop the spaces around a text when they join tokens, others do not."""
    slow = chatglm_tokenizer(repositories, 2)
    fast = fast_twin(slow)
    assert not slow.is_fast and fast.is_fast
    if drops_spaces:
        join = slow.convert_tokens_to_string
        slow.convert_tokens_to_string = lambda tokens: join(tokens).strip()
    truncated = set()
    for batch in random_batches(16):
        for prefix, suffix in (
            ("", "\nTL;DR:"),
            ('in: "', '"? so'),
            ("Par", '."\nAnswer:'),
            ("在 ", " 在"),
            ("在", "."),
        ):
            for max_length in range(7, 26):
                task = Summarization("source", "target", prefix, suffix, max_length, 8)
                encoded = encoded_or_error(task, batch, slow)
                assert encoded == encoded_or_error(task, batch, fast), (batch, prefix, suffix, max_length)
                if not isinstance(encoded, str) and encoded["prompt_length"] == [max_length]:
                    truncated.add((prefix, max_length))
    assert len(truncated) > 60


def test_slow_and_fast_tokenizer_encode_cloze_questions_equally(repositories):
    slow = chatglm_tokenizer(repositories, 2)
    fast = fast_twin(slow)
    num_encoded = 0
    for max_length in (40, 56, 72, 200):
        for row in range(len(ROWS)):
            encoded = encoded_or_error(SuperGlueCloze(max_length=max_length), ROWS[row : row + 1], slow)
            assert encoded == encoded_or_error(SuperGlueCloze(max_length=max_length), ROWS[row : row + 1], fast)
            num_encoded += not isinstance(encoded, str)
    assert num_encoded > len(ROWS)


def test_special_tokens_follow_prompt_of_chatglm_6b_and_precede_prompt_of_chatglm2(repositories):
    batch = {"source": ["a warm film\n  in Paris"], "target": ["Rome"]}
    for generation, (before, after) in {1: ([], ["[gMASK]", "<sop>"]), 2: (["[gMASK]", "sop"], [])}.items():
        tokenizer = chatglm_tokenizer(repositories, generation)
        text = tokenize_texts(["a warm film\n  in Paris\nTL;DR:"], tokenizer)[0]
        encoded = Summarization(max_target_length=8).encode(batch, tokenizer)
        ids, length = encoded["input_ids"][0], encoded["prompt_length"][0]
        assert ids[:length] == tokenizer.build_inputs_with_special_tokens(list(text))
        begin, end = len(before), length - len(after)
        assert tokenizer.convert_ids_to_tokens(ids[:begin]) == before
        assert tokenizer.convert_ids_to_tokens(ids[end:length]) == after
        assert ids[begin:end] == text and ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[length:-1]).strip() == "Rome"
        short = Summarization(max_source_length=length - 3, max_target_length=8).encode(batch, tokenizer)
        assert short["prompt_length"] == [length - 3]
        assert short["input_ids"][0][:begin] == ids[:begin]
        assert short["input_ids"][0][length - 3 - len(after) :] == ids[end:]


def test_line_breaks_of_chatglm_6b_are_kept_by_truncation(repositories):
    tokenizer = chatglm_tokenizer(repositories, 1)
    for batch in random_batches(30):
        source = batch["source"][0]
        encoded = encoded_or_error(Summarization(prefix="in: ", max_source_length=30), batch, tokenizer)
        prompt = tokenizer.decode(encoded["input_ids"][0][: encoded["prompt_length"][0] - 2])
        assert prompt.startswith("in:") and prompt.endswith("\nTL;DR:")
        # The end of a character can be cut off.
        assert f"in: {source}".startswith(prompt[: -len("\nTL;DR:")].rstrip("\ufffd"))


def test_end_tokens_after_text_are_left_out():
    tokenizer = bytes_tokenizer(["a film"])
    assert special_tokens(tokenizer) == ([], [])
    assert special_tokens(pieces_tokenizer(["a: film"])) == ([1], [])
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 0)])
    assert special_tokens(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")) == ([], [])
    backend.post_processor = TemplateProcessing(single="<end> $A <end>", special_tokens=[("<end>", 0)])
    assert special_tokens(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")) == ([0], [])


def test_repository_code_runs_only_if_permitted(repositories):
    for generation in (1, 2):
        name = str(repositories[generation])
        with pytest.raises(ValueError, match="trust_remote_code"):
            load_repository_tokenizer(name)
        # The second message follows if another test has registered a config class for this model type.
        with pytest.raises(ValueError, match="trust_remote_code|Unrecognized configuration class"):
            Summarization().load_model(name)


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("dtype", [None, "auto", "bfloat16"])
def test_model_of_repository_can_generate_each_time_it_is_loaded(repositories, generation, dtype):
    for _ in range(2):
        model = load_causal_model(str(repositories[generation]), trust_remote_code=True, dtype=dtype)
        assert model.can_generate() and model.generation_config.eos_token_id == model.config.eos_token_id
        expected = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert model.all_tied_weights_keys == {}  # the constructor of ChatGLM-6B does not set it


def test_batches_of_chatglm_6b_have_no_attention_mask(repositories):
    tokenizer = chatglm_tokenizer(repositories, 1)
    model = load_causal_model(str(repositories[1]), trust_remote_code=True).eval()
    task = Summarization(max_target_length=8)
    data = Dataset.from_dict({"source": ["a film", "a warm film in Paris"], "target": ["Rome", "it is a film"]})
    prepared = task.prepare(data, tokenizer)
    collate = task.data_collator(tokenizer, model)
    batch = collate(list(prepared))
    assert batch.keys() == {"input_ids", "labels"} and tokenizer.pad_token_id in batch["input_ids"]
    with torch.no_grad():
        logits = model(**batch).logits
        for row, encoded in enumerate(prepared):
            alone = model(torch.tensor([encoded["input_ids"]])).logits[0]
            assert (logits[row, : len(alone)] - alone).abs().max() <= 1e-5
    prompts = list(task.for_evaluation(prepared, tokenizer))
    with pytest.raises(
        ValueError, match="Prompts of different lengths cannot be padded.*per_device_eval_batch_size=1"
    ):
        collate(prompts)
    assert collate(prompts[:1]).keys() == {"input_ids", "labels"}
    other = task.data_collator(tokenizer, load_causal_model(str(repositories[2]), trust_remote_code=True))
    assert isinstance(other, CausalCollator) and "attention_mask" in other(prompts)
