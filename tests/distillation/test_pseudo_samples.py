"""Pseudo-samples: initial embeddings, labels, losses and gradient steps, and models that accept embeddings."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import VOCAB_SIZE, tiny_model
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GemmaConfig,
    GemmaForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_federated.distillation.pseudo_samples import (
    IGNORED,
    adversarial_loss,
    check_takes_embeddings,
    draw_labels,
    initial_embeddings,
    label_loss,
    labeled_positions,
    token_embeddings,
    word_embeddings,
)
from hf_federated.distillation.sample_descent import descend


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_of(model):
    model.eval()

    def logits(embeddings, labels):
        return model(inputs_embeds=embeddings).logits

    return logits


def test_initial_samples_are_word_embeddings_without_special_tokens():
    weight = torch.arange(20.0).view(10, 2)
    samples = initial_embeddings(weight, (50, 7), generator(), special_ids=[0, 3, 99])
    assert samples.shape == (50, 7, 2)
    tokens = samples[..., 0] / 2
    assert torch.equal(samples, weight[tokens.long()])
    assert set(tokens.flatten().tolist()) == {1, 2, 4, 5, 6, 7, 8, 9}


@pytest.mark.parametrize("gaussian", [False, True])
def test_padding_rows_of_the_embedding_are_not_drawn(gaussian):
    weight = torch.randn(10, 2, generator=generator(1))
    padded = torch.cat([weight, torch.full((6, 2), 1e6)])
    samples = initial_embeddings(padded, (50, 7), generator(), [0], gaussian, num_tokens=10)
    assert torch.equal(samples, initial_embeddings(weight, (50, 7), generator(), [0], gaussian))


def test_gaussian_samples_have_the_mean_and_deviation_of_the_embeddings():
    weight = torch.randn(1000, 3, generator=generator(1)) * torch.tensor([1.0, 2.0, 5.0]) + torch.tensor([0.0, 1, -4])
    samples = initial_embeddings(weight, (100, 100), generator(), gaussian=True).view(-1, 3)
    torch.testing.assert_close(samples.mean(0), weight.mean(0), rtol=0, atol=0.15)
    torch.testing.assert_close(samples.std(0), weight.std(0), rtol=0.03, atol=0)


def test_labels_follow_the_label_histogram():
    counts = [10, 0, 30, 60]
    drawn = draw_labels(counts, 5000, generator())
    shares = torch.bincount(drawn, minlength=4) / 5000
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.0, 0.3, 0.6]), rtol=0, atol=0.03)
    assert shares[1] == 0


@pytest.mark.parametrize("counts", [[0, 0], [1, -1], [float("nan"), 1], [float("inf"), 1], []])
def test_invalid_label_histogram_is_rejected(counts):
    with pytest.raises(ValueError, match="label histogram"):
        draw_labels(counts, 4, generator())


def test_descent_lowers_the_loss_and_changes_no_parameter():
    teacher, student = tiny_model(seed=1, initializer_range=0.3), tiny_model(seed=2, initializer_range=0.3)
    before = [parameter.clone() for model in (teacher, student) for parameter in model.parameters()]
    labels = draw_labels([3, 5], 16, generator())
    start = initial_embeddings(word_embeddings(student), (16, 6), generator())
    teacher_logits, student_logits = logits_of(teacher), logits_of(student)
    moved = {
        weight: descend(
            start,
            lambda theta, rows, w=weight: adversarial_loss(theta, labels[rows], teacher_logits, student_logits, w),
            num_steps=100,
            step_size=0.1,
        )
        for weight in (0.0, 0.1)
    }
    with torch.no_grad():
        teacher_loss = {
            weight: label_loss(teacher_logits(theta, labels), labels).sum() for weight, theta in moved.items()
        }
        student_loss = {
            weight: label_loss(student_logits(theta, labels), labels).sum() for weight, theta in moved.items()
        }
        assert max(teacher_loss.values()) < 0.5 * label_loss(teacher_logits(start, labels), labels).sum()
    # With the adversary, the student has a higher loss on the samples.
    assert student_loss[0.1] > student_loss[0.0]
    after = [parameter for model in (teacher, student) for parameter in model.parameters()]
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))


def test_adversarial_loss_with_weight_zero_is_the_target_loss():
    teacher = tiny_model(seed=1)
    labels = draw_labels([1, 1], 4, generator())
    theta = initial_embeddings(word_embeddings(teacher), (4, 6), generator())

    def never(embeddings, labels):
        raise AssertionError("The student is not called.")

    target = F.cross_entropy(logits_of(teacher)(theta, labels), labels, reduction="none")
    torch.testing.assert_close(adversarial_loss(theta, labels, logits_of(teacher), never, 0.0), target)


@pytest.mark.parametrize("adversary", ["ce", "kl"])
def test_adversarial_loss_matches_equation_7(adversary):
    teacher, student = tiny_model(seed=1).double(), tiny_model(seed=2).double()
    labels = draw_labels([1, 1], 5, generator())
    theta = initial_embeddings(word_embeddings(teacher), (5, 6), generator())
    teacher_logits, student_logits = logits_of(teacher)(theta, labels), logits_of(student)(theta, labels)
    adversary_loss = F.cross_entropy(student_logits, labels, reduction="none")
    if adversary == "kl":
        adversary_loss = F.kl_div(
            student_logits.log_softmax(-1), teacher_logits.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
    expected = F.cross_entropy(teacher_logits, labels, reduction="none") - 0.3 * adversary_loss
    logits = adversarial_loss(theta, labels, logits_of(teacher), logits_of(student), 0.3, adversary)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_positions_without_a_label_are_ignored():
    logits = torch.randn(2, 3, 5, generator=generator())
    labels = torch.tensor([[1, IGNORED, IGNORED], [0, 4, IGNORED]])
    kept = torch.stack([logits[0, 0], logits[1, 0], logits[1, 1]])
    assert torch.equal(labeled_positions(logits, labels), kept)
    first, second, third = F.cross_entropy(kept, torch.tensor([1, 0, 4]), reduction="none")
    torch.testing.assert_close(label_loss(logits, labels), torch.stack([first, second + third]))


def tiny_t5(seed: int = 0) -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(config)


DECODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_labels": 3,
    "pad_token_id": 0,
}


def tiny_llama() -> LlamaForSequenceClassification:
    return LlamaForSequenceClassification(LlamaConfig(**DECODER))


def tiny_gemma() -> GemmaForSequenceClassification:
    """A Gemma classifier. Its embedding module multiplies by the square root of the hidden size."""
    return GemmaForSequenceClassification(GemmaConfig(**DECODER, num_key_value_heads=1, head_dim=8))


def tiny_roberta() -> RobertaForSequenceClassification:
    """A RoBERTa classifier. Its position ids start after the pad token id and, for tokens, depend on the padding."""
    config = RobertaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=18,
        pad_token_id=1,
        initializer_range=0.3,
    )
    return RobertaForSequenceClassification(config)


class TokensAlone(PreTrainedModel):
    """A classifier that takes no embeddings, as some models of `transformers`."""

    config_class = BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.words(input_ids).mean(1))
        return SequenceClassifierOutput(logits=logits, loss=F.cross_entropy(logits, labels))


def tiny_pair() -> EncoderDecoderModel:
    small = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(num_hidden_layers=1, **small), BertConfig(num_hidden_layers=1, **small)
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return EncoderDecoderModel(config=config)


@pytest.mark.parametrize(
    "model",
    [tiny_model(), tiny_roberta(), tiny_t5(), tiny_llama(), tiny_gemma(), tiny_pair()],
    ids=lambda model: type(model).__name__,
)
def test_embeddings_of_tokens_give_the_same_logits_as_the_tokens(model):
    check_takes_embeddings(model, length=7)
    model.eval()
    # The tokens contain no padding. RoBERTa's pad token is 1.
    tokens = torch.randint(2, VOCAB_SIZE, (3, 5), generator=generator())
    inputs = {"attention_mask": torch.ones_like(tokens)}
    if model.config.is_encoder_decoder:
        inputs["labels"] = torch.tensor([[4, 5], [6, IGNORED], [7, 8]])
    with torch.no_grad():
        expected = model(input_ids=tokens, **inputs).logits
        logits = model(inputs_embeds=token_embeddings(model)[tokens], **inputs).logits
    torch.testing.assert_close(logits, expected)


def test_model_with_other_results_for_embeddings_is_rejected():
    small = {"vocab_size": VOCAB_SIZE, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    small |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = MarianConfig(**small, scale_embedding=True, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="MarianMTModel gives different results for tokens and for their embeddings"):
        check_takes_embeddings(MarianMTModel(config), length=7)


def test_config_may_have_several_eos_tokens():
    model = tiny_llama()
    model.config.eos_token_id = [1, 2]
    check_takes_embeddings(model, length=7)


@pytest.mark.parametrize("model", [tiny_model(), tiny_roberta(), tiny_pair()], ids=lambda model: type(model).__name__)
def test_sample_length_beyond_the_positions_of_the_model_is_rejected(model):
    limit = getattr(model.config, "encoder", model.config).max_position_embeddings
    with pytest.raises(ValueError, match=f"`sample_length` is {limit + 1}, but .* has {limit} positions"):
        check_takes_embeddings(model, limit + 1)
    if isinstance(model, RobertaForSequenceClassification):  # RoBERTa reserves two positions.
        with pytest.raises(ValueError, match=f"cannot read pseudo-samples of `sample_length` {limit}"):
            check_takes_embeddings(model, limit)


def test_position_ids_of_roberta_embeddings_start_after_the_pad_token_id():
    model = tiny_roberta().eval()
    embeddings = torch.randn(3, 5, 16, generator=generator())
    first = model.config.pad_token_id + 1
    with torch.no_grad():
        logits = model(inputs_embeds=embeddings).logits
        torch.testing.assert_close(
            logits, model(inputs_embeds=embeddings, position_ids=torch.arange(first, first + 5).expand(3, 5)).logits
        )
        # Other position ids give other logits.
        shifted = model(inputs_embeds=embeddings, position_ids=torch.arange(5).expand(3, 5)).logits
    assert (logits - shifted).abs().max() > 1e-2


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        TokensAlone(BertConfig()),
        get_peft_model(TokensAlone(BertConfig()), LoraConfig(target_modules=["head"])),
    ],
    ids=["no transformers model", "transformers model", "with an adapter"],
)
def test_model_without_inputs_embeds_is_rejected(model):
    name = "Linear" if isinstance(model, nn.Linear) else "TokensAlone"
    with pytest.raises(ValueError, match=rf"{name} does not accept them.*inputs_embeds"):
        check_takes_embeddings(model, length=7)


def test_adversary_of_tagging_is_summed_over_the_labeled_positions():
    logits, labels = torch.randn(2, 3, 5, generator=generator()).double(), torch.tensor([[1, 2, IGNORED], [0, 4, 3]])
    student = torch.randn(2, 3, 5, generator=generator(1)).double()
    found = adversarial_loss(logits, labels, lambda theta, _: theta, lambda theta, _: student, 0.5, "kl")
    for row, length in enumerate((2, 3)):
        a, b = logits[row, :length], student[row, :length]
        divergence = F.kl_div(b.log_softmax(-1), a.log_softmax(-1), reduction="sum", log_target=True)
        expected = F.cross_entropy(a, labels[row, :length], reduction="sum") - 0.5 * divergence
        torch.testing.assert_close(found[row], expected)
