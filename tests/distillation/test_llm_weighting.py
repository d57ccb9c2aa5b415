"""Weights from a language model's reply: the prompt, accepted and rejected replies, retries and the fallback."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import transformers
from distillation_setup import distillation_trainer
from language import language_model, tokenizer
from tiny import same_weights
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TextGenerationPipeline

from hf_federated.distillation import ClientReport, LLMWeighting, adafd, enwc, summarize_logits, text_generation
from hf_federated.distillation.llm_weighting import INSTRUCTION, REQUEST


REPORTS = [
    ClientReport("alpine", 10, 0.2, f1=0.9, mean_logits=(1.5, -0.25), std_logits=(0.5, 0.75), mean_entropy=0.125),
    ClientReport("desert", 30, 0.4, f1=0.8),
    ClientReport("forest", 60, 0.8),
]


class ScriptedModel:
    """Return the given replies in order, repeat the last reply, and record the prompts."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.prompts: list[str] = []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        reply = self.replies[min(len(self.prompts), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply


# ---- Prompt


def test_prompt_contains_the_values_of_the_reports():
    model = ScriptedModel("1,1,1")
    LLMWeighting(model)(REPORTS)
    (prompt,) = model.prompts
    assert prompt.split("\n") == [
        INSTRUCTION,
        "",
        "Client 1: training loss=0.2, F1=0.9, mean logits per class=[1.5, -0.25], "
        "standard deviation of logits per class=[0.5, 0.75], logits entropy=0.125",
        "Client 2: training loss=0.4, F1=0.8",
        "Client 3: training loss=0.8",
        "",
        REQUEST,
    ]


def test_prompt_contains_neither_client_ids_nor_rows_of_logits():
    logits = torch.tensor([[1.2345, 6.789], [2.3456, 7.891]])
    model = ScriptedModel("1")
    LLMWeighting(model)([ClientReport("secret id", 10, 0.2, **summarize_logits(logits))])
    assert "secret" not in model.prompts[0]
    assert not any(f"{value:.4g}" in model.prompts[0] for value in logits.flatten().tolist())
    assert f"[{(1.2345 + 2.3456) / 2:.4g}, {(6.789 + 7.891) / 2:.4g}]" in model.prompts[0]


# ---- Accepted replies


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("0.2,0.3,0.5", [0.2, 0.3, 0.5]),
        ("2, 3, 5", [0.2, 0.3, 0.5]),
        (" \n0.2 ,\n0.3,\t0.5.\n", [0.2, 0.3, 0.5]),
        ("0,0,7", [0, 0, 1]),
        (".5,1.,5e-1", [0.25, 0.5, 0.25]),
        ("1e308,1e308,1E+308", [1 / 3, 1 / 3, 1 / 3]),
        ("5e-324,5e-324,0", [0.5, 0.5, 0]),
    ],
    ids=repr,
)
def test_numbers_of_a_reply_are_normalized(reply, expected, caplog):
    weigh = LLMWeighting(ScriptedModel(reply))
    weights = weigh(REPORTS)
    assert list(weights) == ["alpine", "desert", "forest"]
    assert list(weights.values()) == pytest.approx(expected, abs=1e-15)
    assert math.fsum(weights.values()) == pytest.approx(1, abs=1e-15)
    assert (weigh.weights, weigh.fell_back, weigh.num_attempts) == (weights, False, 1)
    assert not caplog.records


# ---- Rejected replies

REJECTED_REPLIES = {
    "0.2,0.8": "expected 3 numbers separated by commas, got 2 pieces",
    "0.1,0.2,0.3,0.4": "got 4 pieces",
    "": "got 1 pieces",
    "The weights are 0.2, 0.3 and 0.5": "got 2 pieces",
    "Sure: 0.2, 0.3, 0.5": "piece 1 is not",
    "0.2,nan,0.5": "piece 2 is not",
    "0.2,0.3,inf": "piece 3 is not",
    "0.2,0.3,1e999": "piece 3 is not a finite",
    "0.2,-0.3,0.5": "piece 2 is not a finite decimal number without a sign",
    "20%,30%,50%": "piece 1 is not",
    "[0.2,0.3,0.5]": "piece 1 is not",
    "0.2,,0.5": "piece 2 is not",
    "0.2,0.3,0.5..": "piece 3 is not",
    "1_0,2,3": "piece 1 is not",
    "٢,٣,٥": "piece 1 is not",
    "0 1,2,3": "piece 1 is not",
    "0,0,0": "all numbers are 0",
}


@pytest.mark.parametrize("reply", REJECTED_REPLIES, ids=repr)
def test_invalid_reply_is_rejected_and_falls_back_to_enwc(reply, caplog):
    model = ScriptedModel(reply)
    weigh = LLMWeighting(model, retries=1, beta=3.0)
    with caplog.at_level(logging.WARNING):
        weights = weigh(REPORTS)
    assert weights == enwc(REPORTS, beta=3.0) == weigh.weights
    assert weigh.fell_back and weigh.num_attempts == len(model.prompts) == 2
    (record,) = caplog.records
    text = record.getMessage()
    assert (
        REJECTED_REPLIES[reply] in text and repr(reply) in text and "ENWC (beta=3.0)" in text and "2 attempts" in text
    )


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            RuntimeError("CUDA out of memory"),
            "the model raised a RuntimeError. The error message is 'CUDA out of memory'",
        ),
        (None, "it was a NoneType and not a text. It was 'None'"),
        ([0.2, 0.3, 0.5], "it was a list and not a text. It was '[0.2, 0.3, 0.5]'"),
        (b"1,2,3", "it was a bytes and not a text"),
    ],
    ids=repr,
)
def test_error_or_non_text_reply_falls_back_to_enwc(reply, reason, caplog):
    weigh = LLMWeighting(ScriptedModel(reply))
    assert weigh(REPORTS) == enwc(REPORTS)
    assert weigh.fell_back and weigh.num_attempts == 3
    assert reason in caplog.text


def test_long_reply_is_shortened_in_the_log(caplog):
    LLMWeighting(ScriptedModel("so " * 1000), retries=0)(REPORTS)
    assert repr(("so " * 1000)[:200]) + "…" in caplog.text and "so " * 67 not in caplog.text


def test_keyboard_interrupt_is_not_caught():
    def interrupted(prompt):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LLMWeighting(interrupted)(REPORTS)


# ---- Retries


def test_retry_prompt_contains_the_reason_of_the_rejection(caplog):
    model = ScriptedModel("0.5, 0.5", TimeoutError("busy"), "1,1,2")
    weigh = LLMWeighting(model)
    assert list(weigh(REPORTS).values()) == [0.25, 0.25, 0.5]
    first, second, third = model.prompts
    assert second == first + "\nYour last reply was refused: expected 3 numbers separated by commas, got 2 pieces."
    assert third == first + "\nYour last reply was refused: the model raised a TimeoutError."
    assert (weigh.fell_back, weigh.num_attempts, weigh.prompt_length) == (False, 3, len(third))
    assert not caplog.records


def test_zero_retries_call_the_model_once():
    model = ScriptedModel("no")
    LLMWeighting(model, retries=0)(REPORTS)
    assert len(model.prompts) == 1


def test_attributes_describe_the_last_call():
    weigh = LLMWeighting(ScriptedModel("no", "1,3"), retries=0)
    assert (weigh.weights, weigh.fell_back, weigh.num_attempts, weigh.prompt_length) == (None,) * 4
    weigh(REPORTS)
    assert weigh.fell_back
    weigh(REPORTS[:2])
    assert not weigh.fell_back and weigh.weights == {"alpine": 0.25, "desert": 0.75}


def test_changing_returned_weights_does_not_change_the_attribute():
    weigh = LLMWeighting(ScriptedModel("1,1,2", "no"), retries=0)
    weigh(REPORTS).clear()
    assert weigh.weights == {"alpine": 0.25, "desert": 0.25, "forest": 0.5}
    weigh(REPORTS).clear()
    assert weigh.weights == enwc(REPORTS)


def test_invalid_reports_are_rejected_before_the_model_is_called():
    model = ScriptedModel("1")
    with pytest.raises(ValueError, match="Client 'a' reports a training loss of nan"):
        LLMWeighting(model)([ClientReport("a", 1, float("nan"))])
    with pytest.raises(ValueError, match="no clients to weigh"):
        LLMWeighting(model)([])
    assert not model.prompts


def test_negative_retries_are_rejected():
    with pytest.raises(ValueError, match="`retries` is -1; it must be 0 or more"):
        LLMWeighting(ScriptedModel(""), retries=-1)


# ---- Models of `transformers`


@pytest.fixture
def pipeline():
    return TextGenerationPipeline(model=language_model(), tokenizer=tokenizer())


def test_pipeline_returns_the_same_generated_text_on_each_call(pipeline):
    generate = text_generation(pipeline, max_new_tokens=5)
    reply = generate("snow1 snow2 snow3")
    torch.manual_seed(1)
    assert reply == generate("snow1 snow2 snow3")
    full = pipeline("snow1 snow2 snow3", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert reply and full == "snow1 snow2 snow3" + reply


def test_chat_template_of_the_tokenizer_is_applied(pipeline):
    plain = text_generation(pipeline, max_new_tokens=5)("snow1")
    pipeline.tokenizer.chat_template = "sand5 {{ messages[0]['role'] }} {{ messages[0]['content'] }} sand7"
    reply = text_generation(pipeline, max_new_tokens=5)("snow1")
    pipeline.tokenizer.chat_template = None
    assert reply == text_generation(pipeline, max_new_tokens=5)("sand5 user snow1 sand7") != plain


def test_pipeline_may_sample(pipeline):
    generate = text_generation(pipeline, max_new_tokens=8, do_sample=True)
    replies = set()
    for seed in range(8):
        torch.manual_seed(seed)
        replies.add(generate("snow1"))
    assert len(replies) > 1


def test_untrained_model_falls_back_to_enwc(pipeline, caplog):
    weigh = LLMWeighting(text_generation(pipeline, max_new_tokens=4))
    assert weigh(REPORTS) == enwc(REPORTS)
    assert weigh.fell_back and "ENWC" in caplog.text


def test_numbers_of_a_generating_model_are_used():
    """The attention and feed-forward layers of this Llama are zero. Its head maps each token to a fixed next token."""
    words = ["<pad>", "<eos>", "<unk>", "ask", "3", ",", "1"]
    tokens = _tokenizer(words)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    chain = [(2, 4), (3, 4), (4, 5), (5, 6), (6, 1)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(len(words), 8))
        for before, after in chain:
            model.lm_head.weight[after, before] = 1
    model.generation_config.max_new_tokens = 1  # `text_generation` must override this limit.
    pipeline = TextGenerationPipeline(model=model, tokenizer=tokens)
    weigh = LLMWeighting(text_generation(pipeline))
    assert weigh(REPORTS[:2]) == {"alpine": 0.75, "desert": 0.25}
    assert not weigh.fell_back


@pytest.mark.slow
def test_adafd_loads_a_named_model_once(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    language_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    loaded = []

    def load(kind, name):
        loaded.append(name)
        return transformers.pipeline(kind, name)

    monkeypatch.setattr(adafd, "pipeline", load)
    trainer = distillation_trainer(tmp_path, "adafd", {"weighting": "llm", "generate": str(folder)})
    trainer.train()
    by_losses = distillation_trainer(tmp_path / "enwc", "adafd", {"weighting": "enwc"})
    by_losses.train()
    fell_back = [log["federated/llm_fell_back"] for log in trainer.state.log_history if "federated/weight/a" in log]
    assert fell_back == [1.0, 1.0] and loaded == [str(folder)]  # The untrained model writes no numbers.
    assert same_weights(trainer.model, by_losses.model)


def test_missing_model_raises_an_error_before_training(tmp_path):
    with pytest.raises(ValueError, match="nothing', but there is no model with this name"):
        distillation_trainer(tmp_path, "adafd", {"weighting": "llm", "generate": str(tmp_path / "nothing")})


def _tokenizer(words):
    """A tokenizer with one token per word. Unknown words map to `<unk>`."""
    model = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
