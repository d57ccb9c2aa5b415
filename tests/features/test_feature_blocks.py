"""The remaining blocks on cached hidden states compute and learn what the whole model with `freeze` does."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from tiny import arguments
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from hf_federated import FederatedConfig, FederatedTrainer, freeze_layers
from hf_federated.features import BlocksClassifier, FrozenEncoder, FrozenLayers, complete_model
from hf_federated.tasks import TextClassification


SIZES = {"vocab_size": 40, "num_labels": 3}
BERT = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20, "num_hidden_layers": 3}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXTS = ["a dull film", "a bright plot and a warm film and a cold plot", "warm", "not a film", "bright"] * 3


def bert(**kwargs):
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES, **BERT, **kwargs))


def roberta():
    return RobertaForSequenceClassification(RobertaConfig(**SIZES, **BERT, max_position_embeddings=40))


def distilbert():
    return DistilBertForSequenceClassification(DistilBertConfig(**SIZES, dim=16, n_heads=2, hidden_dim=20, n_layers=3))


@pytest.mark.parametrize("freeze", ["embeddings", "embeddings+2", "embeddings+3"])
def test_loss_and_gradients_equal_those_of_the_whole_model_with_freeze(freeze):
    whole = bert(**NO_DROPOUT).double().train()
    head = BlocksClassifier.from_model(whole, freeze)
    freeze_layers(whole, freeze)
    torch.manual_seed(1)
    ids, labels = torch.randint(1, 40, (4, 7)), torch.tensor([0, 2, 1, 1])
    mask = torch.ones_like(ids)
    mask[0, 3:] = mask[2, 5:] = 0
    with torch.no_grad():
        hidden = whole.bert(ids, attention_mask=mask, output_hidden_states=True).hidden_states[int(freeze[11:] or 0)]
    expected = whole(input_ids=ids, attention_mask=mask, labels=labels)
    found = head.double()(inputs_embeds=hidden, attention_mask=mask, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-14)
    expected.loss.backward()
    found.loss.backward()
    trained = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
    assert sorted(head.whole_state()) == sorted(trained)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for (name, _), parameter in zip(head.whole_state().items(), head.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("build", [bert, roberta, distilbert])
def test_several_architectures_are_cut(build):
    whole = build().eval()
    head = BlocksClassifier.from_model(whole, "embeddings+1")
    ids = torch.randint(4, 40, (2, 5))
    hidden = whole.base_model(ids, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(head(inputs_embeds=hidden).logits, whole(ids).logits)


def test_models_that_cannot_be_cut_are_refused():
    albert = AlbertForSequenceClassification(AlbertConfig(**SIZES, **BERT, embedding_size=8))
    with pytest.raises(ValueError, match="AlbertForSequenceClassification has no single list of blocks"):
        BlocksClassifier.from_model(albert, "embeddings+1")
    with pytest.raises(ValueError, match="has 3 blocks. Use a smaller number"):
        BlocksClassifier.from_model(bert(), "embeddings+4")
    with pytest.raises(ValueError, match="'2', without the embeddings. Use 'embeddings\\+2'"):
        BlocksClassifier.from_model(bert(), "2")
    with pytest.raises(ValueError, match="Pass hidden states as `inputs_embeds`"):
        BlocksClassifier.from_model(bert(), "embeddings").get_input_embeddings()(torch.ones(1, 2))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_hidden_states_of_the_frozen_blocks_are_cached_per_token(model_dir, number):
    whole = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    encoder = FrozenLayers(model_dir, f"embeddings+{number}", dtype="float32")
    for text, found in zip(TEXTS[:5], encoder.fetch([TEXTS[:5]]), strict=True):
        with torch.no_grad():
            hidden = whole.bert(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        torch.testing.assert_close(torch.tensor(found), hidden[number][0])


def test_depth_and_type_are_part_of_the_key(model_dir):
    encoders = [
        FrozenEncoder(model_dir),
        FrozenLayers(model_dir, "embeddings"),
        FrozenLayers(model_dir, "1+embeddings"),
    ]
    assert len({encoder.digest for encoder in encoders}) == 3
    sizes = [
        FrozenLayers(model_dir, "embeddings", dtype=dtype).fetch([["warm"]])[0] for dtype in ("float16", "float32")
    ]
    assert [each.dtype.itemsize for each in sizes] == [2, 4]


def test_freeze_of_more_blocks_than_the_model_has_is_refused(model_dir):
    with pytest.raises(ValueError, match="`freeze` is 'embeddings\\+4'; .* has 3 blocks"):
        FrozenLayers(model_dir, "embeddings+4").fetch([["warm"]])


def federation(model_dir, tmp_path, head):
    task, encoder = TextClassification(label_names=["x", "y", "z"]), FrozenLayers(model_dir, "embeddings+2")
    rows = Dataset.from_dict({"text": TEXTS, "label": [0, 1, 2, 0, 1] * 3})
    encoded = task.prepare(rows, encoder)
    trainer = FederatedTrainer(
        model=head,
        args=arguments(tmp_path, learning_rate=0.01, per_device_train_batch_size=4),
        train_dataset={name: encoded.select(range(start, 15, 3)) for start, name in enumerate("abc")},
        eval_dataset=encoded,
        processing_class=encoder,
        data_collator=task.data_collator(encoder),
        compute_metrics=task.build_compute_metrics(),
        federation=FederatedConfig(num_rounds=3, aggregation="fedprox"),
    )
    return trainer, encoder


def load_head(model_dir):
    torch.manual_seed(0)
    whole = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=3)
    return BlocksClassifier.from_model(whole, "embeddings+2")


def test_clients_train_the_blocks_in_the_lean_loop(model_dir, tmp_path):
    trainer, encoder = federation(model_dir, tmp_path, load_head(model_dir))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert '"local_loops": {"lean": 9}' in (tmp_path / "_rounds.jsonl").read_text()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    batch = trainer.data_collator([trainer.eval_dataset[0], trainer.eval_dataset[1]])
    expected = trainer.model.eval()(**batch).logits
    assert torch.equal(loaded(**batch).logits, expected)

    whole = complete_model(loaded, encoder)  # takes texts again, and needs no code of this package
    assert type(whole) is BertForSequenceClassification
    tokens = encoder.tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    torch.testing.assert_close(whole(**tokens).logits, expected, rtol=1e-2, atol=1e-3)  # float16 on disk


def test_clients_train_lora_on_the_blocks(model_dir, tmp_path):
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["query", "value"])
    trainer, _ = federation(model_dir, tmp_path, get_peft_model(load_head(model_dir), config))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert 0 < trainer.ledger.bytes_up < 9 * 4 * trainer.model.get_base_model().num_parameters() / 2
