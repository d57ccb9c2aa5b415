"""`federate()` around `SentenceTransformerTrainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from language import sentences, tokenizer
from tiny import same_weights
from transformers import BertConfig, BertModel

from hf_federated import FederatedConfig, FederatedDataset, federate


sentence_transformers = pytest.importorskip("sentence_transformers")


def encoder(folder: Path) -> Any:
    """Build a two-layer BERT with mean pooling."""
    if not folder.exists():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
            BertModel(BertConfig(vocab_size=27, max_position_embeddings=32, **sizes)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = Transformer(str(folder))
    pooling = Pooling(transformer.get_embedding_dimension())
    return sentence_transformers.SentenceTransformer(modules=[transformer, pooling], device="cpu")


def pairs(client_id: str, num_rows: int) -> Dataset:
    texts = sentences(client_id, num_rows + 1)
    return Dataset.from_dict({"anchor": texts[:-1], "positive": texts[1:]})


def arguments(output_dir: Path, **kwargs: Any) -> Any:
    return sentence_transformers.SentenceTransformerTrainingArguments(
        **{
            "output_dir": str(output_dir),
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "use_cpu": True,
            **kwargs,
        }
    )


class CountingTrainer(sentence_transformers.SentenceTransformerTrainer):
    """Records the number of examples of each prepared dataset."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.prepared: list[int] = []
        super().__init__(*args, **kwargs)

    def preprocess_dataset(self, dataset=None, dataset_name=None):
        if dataset is not None:
            self.prepared.append(len(dataset))
        return super().preprocess_dataset(dataset, dataset_name=dataset_name)


def losses(model: Any) -> Any:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    return MultipleNegativesRankingLoss(model)


def test_sentence_transformer_trains_saves_and_resumes_over_two_clients(tmp_path) -> None:
    model = encoder(tmp_path / "encoder")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = federate(CountingTrainer)(
        model=model,
        args=arguments(tmp_path / "run", save_strategy="epoch"),
        train_dataset={"north": pairs("north", 9), "south": pairs("south", 6)},
        loss=losses(model),
        federation=FederatedConfig(num_rounds=2),
    )
    trainer.train()
    assert trainer.prepared == [9, 6]
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    trainer.create_model_card()
    trainer.save_model(str(tmp_path / "final"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "final"), device="cpu")
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert torch.equal(
        torch.as_tensor(loaded.encode(["snow1 snow2"])), torch.as_tensor(trainer.model.encode(["snow1 snow2"]))
    )


def build_with_column(folder: Path, keep_column: bool) -> tuple[Any, Any]:
    """Return a trainer over the clients of a column, and its model."""
    model = encoder(folder / "encoder")
    rows = concatenate_datasets(
        [pairs(name, number).add_column("site", [name] * number) for name, number in (("north", 9), ("south", 6))]
    )
    trainer = federate(sentence_transformers.SentenceTransformerTrainer)(
        model=model,
        args=arguments(folder / "run"),
        train_dataset=FederatedDataset.from_column(rows, "site", keep_column=keep_column),
        loss=losses(model),
        federation=FederatedConfig(num_rounds=1),
    )
    return trainer, model


def test_name_of_the_client_is_not_embedded(tmp_path, caplog) -> None:
    trainer, model = build_with_column(tmp_path, keep_column=False)
    assert "names the client" not in caplog.text
    seen: set[str] = set()
    model.register_forward_pre_hook(lambda _, inputs: seen.update(tokenizer().batch_decode(inputs[0]["input_ids"])))
    trainer.train()
    # The tokenizer does not know the names of the clients.
    assert seen and not any("<unk>" in text for text in seen)


def test_kept_column_with_the_client_is_named_in_one_warning(tmp_path, caplog) -> None:
    for _ in range(2):
        build_with_column(tmp_path, keep_column=True)
    assert caplog.text.count("has the column 'site', which names the client") == 1
    assert "FederatedSentenceTransformerTrainer trains on all columns" in caplog.text
    assert "clients.remove_columns('site')" in caplog.text


def test_one_client_equals_the_plain_trainer(tmp_path) -> None:
    models = [encoder(tmp_path / "encoder") for _ in range(2)]
    plain = sentence_transformers.SentenceTransformerTrainer(
        model=models[0],
        args=arguments(tmp_path / "plain", num_train_epochs=2),
        train_dataset=pairs("north", 9),
        loss=losses(models[0]),
    )
    plain.train()
    federated = federate(sentence_transformers.SentenceTransformerTrainer)(
        model=models[1],
        args=arguments(tmp_path / "federated"),
        train_dataset=pairs("north", 9),
        loss=losses(models[1]),
        federation=FederatedConfig(num_rounds=2, client_optimizer_state="carry"),
    )
    federated.train()
    assert same_weights(*models)


def test_streams_of_two_clients_continue_in_the_next_round(tmp_path) -> None:
    model = encoder(tmp_path / "encoder")
    rows = {"north": pairs("north", 12), "south": pairs("south", 8)}
    trainer = federate(sentence_transformers.SentenceTransformerTrainer)(
        model=model,
        args=arguments(tmp_path / "run"),
        train_dataset={name: data.to_iterable_dataset() for name, data in rows.items()},
        loss=losses(model),
        federation=FederatedConfig(num_rounds=2, local_steps=1),
    )
    seen: list[str] = []
    model.register_forward_pre_hook(
        lambda _, inputs: seen.extend(tokenizer().batch_decode(inputs[0]["input_ids"], skip_special_tokens=True))
    )
    trainer.train()
    expected = [
        rows[name][column][start : start + 4] for start in (0, 4) for name in rows for column in rows[name].features
    ]
    assert [text.strip() for text in seen] == [text for batch in expected for text in batch]
