"""Weights from the probabilities of digits: every language model gives valid weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from causal import bytes_tokenizer, llama
from distillation_setup import SIZES, distillation_trainer
from transformers import TextGenerationPipeline

from hf_federated import AdaFD
from hf_federated.distillation import ClientReport, DigitWeighting, candidate_scoring, enwc
from hf_federated.distillation.digit_weighting import DIGIT_REQUEST
from hf_federated.distillation.llm_weighting import weighting_prompt


REPORTS = [ClientReport("alpine", 10, 0.2, f1=0.9), ClientReport("desert", 30, 0.4), ClientReport("forest", 60, 0.8)]
DIGITS = "123456789"


def scorer(table):
    """Return the scores of a table by the number of digits that the reply has so far."""

    def score(prompt, reply, candidates):
        assert list(candidates) == list(DIGITS)
        return table[reply.count(",")]

    return score


def pipeline_of(seed: int, chat_template: str | None = None) -> TextGenerationPipeline:
    tokenizer = bytes_tokenizer([weighting_prompt(REPORTS), DIGIT_REQUEST, "1,2,3,4,5,6,7,8,9"])
    tokenizer.chat_template = chat_template
    return TextGenerationPipeline(model=llama(len(tokenizer), seed=seed), tokenizer=tokenizer)


def test_weights_are_the_expected_digits():
    table = np.random.default_rng(0).normal(size=(3, 9)) * 3
    probabilities = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    expected = probabilities @ np.arange(1, 10)
    weights = DigitWeighting(scorer(table.tolist()))(REPORTS)
    assert list(weights) == ["alpine", "desert", "forest"]
    assert list(weights.values()) == pytest.approx(expected / expected.sum())


def test_model_sees_the_digits_of_the_clients_before():
    seen = []

    def score(prompt, reply, candidates):
        seen.append((prompt, reply))
        return [0.0 if candidate == "739"[len(seen) - 1] else -math.inf for candidate in candidates]

    weights = DigitWeighting(score)(REPORTS)
    assert seen == [(f"{weighting_prompt(REPORTS)}\n{DIGIT_REQUEST}", reply) for reply in ("", "7,", "7,3,")]
    assert list(weights.values()) == pytest.approx([7 / 19, 3 / 19, 9 / 19])


@pytest.mark.parametrize(
    "chat_template", [None, "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"]
)
def test_scores_are_the_log_probabilities_of_the_next_token(chat_template):
    pipeline = pipeline_of(0, chat_template)
    scores = candidate_scoring(pipeline)("Weigh them.", "3,", list(DIGITS))
    text = "Weigh them.\n" if chat_template is None else "<user>Weigh them."
    tokenizer = pipeline.tokenizer
    tokens = tokenizer(text)["input_ids"] + tokenizer("3,", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = pipeline.model.double()(input_ids=torch.tensor([tokens])).logits[0, -1]
    ids = [tokenizer(digit, add_special_tokens=False)["input_ids"][0] for digit in DIGITS]
    assert scores == pytest.approx(logits.log_softmax(-1)[ids].tolist(), abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_untrained_model_gives_valid_weights(seed):
    weigh = DigitWeighting(candidate_scoring(pipeline_of(seed)))
    weights = weigh(REPORTS)
    assert not weigh.fell_back and sum(weights.values()) == pytest.approx(1)
    assert max(weights.values()) <= 9 * min(weights.values())
    assert weigh(REPORTS) == weights
    assert weigh(REPORTS[:1]) == {"alpine": 1.0}


@pytest.mark.parametrize(
    "scores",
    [[0.0] * 8, [math.nan] * 9, [-math.inf] * 9, [math.inf] * 9, "no numbers", RuntimeError("out of memory")],
    ids=["eight", "nan", "impossible", "infinite", "text", "error"],
)
def test_invalid_scores_give_the_weights_of_enwc(scores):
    def score(prompt, reply, candidates):
        if isinstance(scores, Exception):
            raise scores
        return scores

    weigh = DigitWeighting(score, beta=2.0)
    assert weigh(REPORTS) == enwc(REPORTS, 2.0) and weigh.fell_back


def test_tokenizer_that_splits_candidates_is_refused():
    with pytest.raises(ValueError, match="they must differ in the last token only"):
        candidate_scoring(pipeline_of(0))("Weigh them.", "", ["Client 1", "9"])


def test_adafd_weighs_by_digits(tmp_path):
    table = [[0.0 if digit == favorite else -math.inf for digit in DIGITS] for favorite in "844"]
    trainer = distillation_trainer(tmp_path, "adafd", {"weighting": "llm", "score": scorer(table)})
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "federated/weight/a" in entry]
    assert [logged[0][f"federated/weight/{client_id}"] for client_id in SIZES] == [0.5, 0.25, 0.25]
    assert {entry["federated/llm_fell_back"] for entry in logged} == {0.0}


def test_adafd_loads_the_model_that_scores(tmp_path):
    pipeline = pipeline_of(0)
    pipeline.model.save_pretrained(tmp_path / "model")
    pipeline.tokenizer.save_pretrained(tmp_path / "model")
    kwargs = {"weighting": "llm", "score": str(tmp_path / "model")}
    trainer = distillation_trainer(tmp_path / "out", "adafd", kwargs, federation={"num_rounds": 1})
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "federated/weight/a" in entry)
    assert entry["federated/llm_fell_back"] == 0
    assert sum(entry[f"federated/weight/{client_id}"] for client_id in SIZES) == pytest.approx(1)
    with pytest.raises(ValueError, match="`score` is 'nowhere', but there is no model with this name"):
        distillation_trainer(tmp_path / "no", "adafd", {"weighting": "llm", "score": "nowhere"}).train()


def test_server_of_adafd_learns_by_kl_divergence():
    generator = torch.Generator().manual_seed(0)
    logits, targets = (torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    temperature = 2.0
    loss = AdaFD(weighting="uniform", loss="kl", temperature=temperature).server_loss(logits, targets)
    teacher, student = (np.exp(each.numpy() / temperature) for each in (targets, logits))
    teacher, student = (each / each.sum(axis=1, keepdims=True) for each in (teacher, student))
    expected = temperature**2 * (teacher * np.log(teacher / student)).sum(axis=1).mean()
    assert float(loss) == pytest.approx(expected)
    assert float(AdaFD().server_loss(logits, targets)) == pytest.approx(float(((logits - targets) ** 2).mean()))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weighting": "llm"}, "`generate` and `score` are both None"),
        ({"weighting": "llm", "generate": str, "score": str}, "`generate` and `score` are both set"),
        ({"weighting": "enwc", "score": "model"}, "`score`"),
        ({"weighting": "llm", "score": 3}, "a function that scores continuations"),
        ({"loss": "l1"}, "`loss` is 'l1'"),
        ({"loss": "kl", "center": True}, "`center`"),
    ],
)
def test_arguments_that_do_not_fit(kwargs, message):
    with pytest.raises(ValueError) as error:
        AdaFD(**kwargs)
    assert message in str(error.value)
