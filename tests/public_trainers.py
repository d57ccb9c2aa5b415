"""The public trainers of TRL and of sentence-transformers, each with a tiny model and tiny examples."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from language import SPECIAL, WORDS, language_model, preferences, sentences, texts, tokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)


def rewards_by_length(completions: list[str], **columns: Any) -> list[float]:
    """The reward of a completion: its number of words."""
    return [float(len(completion.split())) for completion in completions]


# ---- Examples of a client


def prompts(client_id: str, num_rows: int) -> Dataset:
    return Dataset.from_dict({"prompt": sentences(client_id, num_rows)})


def privileged(client_id: str, num_rows: int) -> Dataset:
    return prompts(client_id, num_rows).add_column("privileged_context", sentences(client_id, num_rows))


def completions(client_id: str, num_rows: int) -> Dataset:
    words = WORDS[client_id]
    answers = [f" {words[i % 12]}" for i in range(num_rows)]
    return Dataset.from_dict({"prompt": sentences(client_id, num_rows), "completion": answers})


def judged(client_id: str, num_rows: int) -> Dataset:
    labels = [i % 2 == 0 for i in range(num_rows)]
    return completions(client_id, num_rows).add_column("label", labels)


def triples(client_id: str, num_rows: int) -> Dataset:
    words = WORDS[client_id]
    references = [f" {words[(i + 3) % 12]}" for i in range(num_rows)]
    return preferences(client_id, num_rows).add_column("reference", references)


def conversations(client_id: str, num_rows: int) -> Dataset:
    rows = completions(client_id, num_rows)
    messages = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in rows
    ]
    return Dataset.from_dict({"messages": messages})


def pairs(client_id: str, num_rows: int) -> Dataset:
    found = sentences(client_id, num_rows + 1)
    return Dataset.from_dict({"anchor": found[:-1], "positive": found[1:]})


def scored_pairs(client_id: str, num_rows: int) -> Dataset:
    return pairs(client_id, num_rows).add_column("label", [float(i % 2) for i in range(num_rows)])


# ---- Trainers


CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<eos>{% endfor %}"


def chat_tokenizer() -> Any:
    """The tokenizer with a template of conversations."""
    made = tokenizer()
    made.bos_token = made.eos_token
    made.chat_template = CHAT_TEMPLATE
    return made


def saved_language_model(folder: Path) -> Any:
    """The language model from a folder, from which trainers load their reference model."""
    target = folder / "language_model"
    if not target.exists():
        language_model().save_pretrained(target)
        chat_tokenizer().save_pretrained(target)
    return LlamaForCausalLM.from_pretrained(target)


def reward_model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=27, pad_token_id=0, num_labels=1, **sizes)
        return LlamaForSequenceClassification(config)


@dataclass(frozen=True)
class PublicTrainer:
    """
    A public trainer.

    Args:
        library (`str`): The package.
        module (`str`): Module of the trainer and of its training arguments.
        name (`str`): Name of the class.
        rows (`Callable[[str, int], Dataset]`): Builds the examples of a client.
        args (`Mapping[str, Any]`): Training arguments in addition to the common ones.
        parts (`Callable[[Path], Mapping[str, Any]]`): Builds further arguments of the trainer, in a folder.
        needs (`Mapping[str, Any]`): Training arguments that a federation needs and the trainer alone does not.
    """

    library: str
    module: str
    name: str
    rows: Callable[[str, int], Dataset]
    args: Mapping[str, Any] = field(default_factory=dict)
    parts: Callable[[Path], Mapping[str, Any]] = lambda folder: {}
    needs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_changed_lines(self) -> int:
        """Number of lines of a script that a federation changes: the import, the class, the dataset, and `needs`."""
        return 3 + len(self.needs)

    @property
    def trainer_class(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)

    def arguments(self, folder: Path, **kwargs: Any) -> Any:
        """The training arguments."""
        common = {
            "output_dir": str(folder / "run"),
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_strategy": "epoch",
        }
        if self.library == "trl":
            name = self.name.replace("Trainer", "Config")
            common |= {"bf16": False, "gradient_checkpointing": False}
        else:
            name = self.name.replace("Trainer", "TrainingArguments")
        return getattr(importlib.import_module(self.module), name)(**{**common, **self.args, **self.needs, **kwargs})

    def build(self, cls: Any, folder: Path, train_dataset: Any, args: Any = None, **kwargs: Any) -> Any:
        """
        Build a trainer.

        Args:
            cls (`type`): The class, or the federated class.
            folder (`pathlib.Path`): Folder for the output and the saved models.
            train_dataset (`Any`): The training examples.
            args (`Mapping[str, Any]`, *optional*): Training arguments.
            kwargs: Further arguments of the trainer.
        """
        made = {"args": self.arguments(folder, **(args or {})), "train_dataset": train_dataset}
        made |= {**self.parts(folder), **kwargs}
        if self.library == "trl":
            made.setdefault("processing_class", chat_tokenizer())
            if "model" not in made:
                made["model"] = saved_language_model(folder)
        return cls(**made)


GENERATES = {"max_completion_length": 4, "num_generations": 2}
SHORT = {"max_length": 16}
GOLD = {"max_length": 64, "max_completion_length": 4, "lmbda": 0.5}


def with_reward(folder: Path) -> Mapping[str, Any]:
    return {"reward_funcs": rewards_by_length}


def with_teacher(folder: Path) -> Mapping[str, Any]:
    return {"teacher_model": changed(saved_language_model(folder))}


def changed(model: Any) -> Any:
    """Change the weights of a model. A student with the weights of its teacher would have no gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def with_bytes(folder: Path) -> Mapping[str, Any]:
    """A model and a teacher whose tokens are bytes, which GOLD compares."""
    alphabet = sorted(ByteLevel.alphabet())
    words = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    made = Tokenizer(BPE(vocab=words, merges=[], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    processor = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>", unk_token="<unk>"
    )
    processor.chat_template = CHAT_TEMPLATE
    models = [language_model(vocab_size=len(words)) for _ in range(2)]
    for model in models:
        model.config.max_position_embeddings = 256
    processor.save_pretrained(folder / "teacher")
    models[1].save_pretrained(folder / "teacher")
    return {
        "model": models[0],
        "processing_class": processor,
        "teacher_model": changed(LlamaForCausalLM.from_pretrained(folder / "teacher")),
    }


def with_reward_model(folder: Path) -> Mapping[str, Any]:
    return {"model": reward_model()}


def _encoder_folder(folder: Path, model_class: Any, **settings: Any) -> str:
    target = folder / model_class.__name__
    if not target.exists():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
            model_class(BertConfig(vocab_size=27, max_position_embeddings=32, **sizes, **settings)).save_pretrained(
                target
            )
        tokenizer().save_pretrained(target)
    return str(target)


def sentence_encoder(folder: Path) -> Mapping[str, Any]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = Transformer(_encoder_folder(folder, BertModel))
    modules = [transformer, Pooling(transformer.get_embedding_dimension())]
    model = SentenceTransformer(modules=modules, device="cpu")
    return {"model": model, "loss": MultipleNegativesRankingLoss(model)}


def cross_encoder(folder: Path) -> Mapping[str, Any]:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    model = CrossEncoder(_encoder_folder(folder, BertForSequenceClassification, num_labels=1), device="cpu")
    return {"model": model, "loss": BinaryCrossEntropyLoss(model)}


def sparse_encoder(folder: Path) -> Mapping[str, Any]:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    model = SparseEncoder(_encoder_folder(folder, BertForMaskedLM), device="cpu")
    ranking = SparseMultipleNegativesRankingLoss(model)
    return {
        "model": model,
        "loss": SpladeLoss(model, ranking, document_regularizer_weight=1e-3, query_regularizer_weight=1e-3),
    }


def multi_vector_encoder(folder: Path) -> Mapping[str, Any]:
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

    model = MultiVectorEncoder(_encoder_folder(folder, BertModel), device="cpu")
    return {"model": model, "loss": MultiVectorMultipleNegativesRankingLoss(model)}


def _trl(name: str, rows: Any, args: Mapping[str, Any], parts: Any = lambda folder: {}) -> PublicTrainer:
    return PublicTrainer("trl", "trl", name, rows, args, parts)


def _experimental(
    module: str, name: str, rows: Any, args: Mapping[str, Any], parts: Any = lambda folder: {}, **needs: Any
) -> PublicTrainer:
    return PublicTrainer("trl", f"trl.experimental.{module}", name, rows, args, parts, needs)


def _sentences(name: str, rows: Any, parts: Any) -> PublicTrainer:
    return PublicTrainer("sentence_transformers", "sentence_transformers", name, rows, {}, parts)


TRAINERS = {
    trainer.name: trainer
    for trainer in (
        _trl("SFTTrainer", texts, SHORT),
        _trl("DPOTrainer", preferences, SHORT),
        _trl("KTOTrainer", judged, SHORT),
        _trl("RewardTrainer", preferences, SHORT, with_reward_model),
        _trl("GRPOTrainer", prompts, GENERATES, with_reward),
        _trl("RLOOTrainer", prompts, GENERATES, with_reward),
        _trl("DistillationTrainer", prompts, {"max_completion_length": 4}, with_teacher),
        _experimental("orpo", "ORPOTrainer", preferences, SHORT),
        _experimental("cpo", "CPOTrainer", preferences, SHORT),
        _experimental("tpo", "TPOTrainer", triples, SHORT),
        _experimental("gkd", "GKDTrainer", conversations, {"max_length": 32, "max_new_tokens": 4}, with_teacher),
        _experimental("gmpo", "GMPOTrainer", prompts, GENERATES, with_reward),
        _experimental(
            "a2po", "A2POTrainer", prompts, {"max_completion_length": 4, "num_value_samples": 2}, with_reward
        ),
        _experimental("sdft", "SDFTTrainer", privileged, {**GENERATES, "distillation_topk": 4}),
        _experimental("sdpo", "SDPOTrainer", prompts, GENERATES, with_reward, teacher_model_kind="base"),
        _experimental("online_dpo", "OnlineDPOTrainer", prompts, {"max_new_tokens": 4}, with_reward),
        _experimental("gold", "GOLDTrainer", conversations, GOLD, with_bytes),
        _experimental("iw_opd", "IWOPDTrainer", conversations, {"max_completion_length": 4}, with_teacher),
        _experimental("server_distillation", "ServerDistillationTrainer", prompts, {"max_completion_length": 4}),
        _experimental("async_grpo", "AsyncGRPOTrainer", prompts, {}, with_reward),
        _experimental("async_distillation", "AsyncDistillationTrainer", prompts, {}, with_teacher),
        _sentences("SentenceTransformerTrainer", pairs, sentence_encoder),
        _sentences("CrossEncoderTrainer", scored_pairs, cross_encoder),
        _sentences("SparseEncoderTrainer", pairs, sparse_encoder),
        _sentences("MultiVectorEncoderTrainer", pairs, multi_vector_encoder),
    )
}


def installed_trainers() -> set[str]:
    """Names of the trainers that the installed versions export."""
    import sentence_transformers
    import trl.experimental

    modules = [sentence_transformers, importlib.import_module("trl")]
    for found in pkgutil.iter_modules(trl.experimental.__path__):
        modules.append(importlib.import_module(f"trl.experimental.{found.name}"))
    names = {name for module in modules for name in dir(module) if name.endswith("Trainer")}
    return {name for name in names if not name.startswith("_")}
