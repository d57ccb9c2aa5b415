"""Features of `Trainer` that a split trainer either reproduces on the unsplit model's numbers or rejects with an
error.
"""

from __future__ import annotations

import importlib.metadata
import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from split_runs import STRATEGIES, arguments, assert_close, clients_of, rows_of, whole_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)
from transformers.trainer_utils import SchedulerType
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_federated import SplitConfig, SplitFederatedTrainer, SplitModel, split_federate


SCHEDULES = {
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 2},
}
# Schedules whose learning rate depends on evaluation metrics.
UNSUPPORTED_SCHEDULES = {SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY}


def dataset_with_unequal_targets(num_rows: int = 8) -> Dataset:
    """Dataset in which the batches have different numbers of target tokens."""
    rows = rows_of(0, num_rows, 9).to_dict()
    labels = [[-100] * (number % 5) + row_labels[number % 5 :] for number, row_labels in enumerate(rows["labels"])]
    return Dataset.from_dict({"input_ids": rows["input_ids"], "labels": labels})


def train_both(directory, create_model=whole_model, base_class=Trainer, rows=None, eval_dataset=None, **changes):
    """
    Train a plain trainer and a split trainer with a single client.

    With the default epsilon of 1e-8, Adam amplifies the rounding of gradients that are nearly zero.
    """
    rows = dataset_with_unequal_targets() if rows is None else rows
    trainers = []
    for number, trainer_class in enumerate((base_class, split_federate(base_class))):
        args = arguments(
            directory / str(number), **{"weight_decay": 0.1, "num_train_epochs": 2, "adam_epsilon": 1e-6, **changes}
        )
        trainer = trainer_class(create_model(), args, train_dataset=rows, eval_dataset=eval_dataset)
        trainer.train()
        trainers.append(trainer)
    return trainers


def values(trainer) -> dict[str, torch.Tensor]:
    model = trainer.model
    if not isinstance(model, SplitModel):
        return dict(model.named_parameters())
    return {name: value for part in model.parts for name, value in part.named_original_parameters()}


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


def assert_same_training(plain, split, tolerance=1e-6):
    assert_close(values(split), values(plain), tolerance)
    for name in ("loss", "eval_loss", "learning_rate", "grad_norm"):
        assert logged(split, name) == pytest.approx(logged(plain, name), abs=1e-5), name
    assert logged(split, "loss")


@pytest.mark.parametrize("schedule", [schedule for schedule in SchedulerType if schedule not in UNSUPPORTED_SCHEDULES])
@pytest.mark.sampled(4)
def test_every_schedule_is_that_of_trainer(schedule, tmp_path):
    changes = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": SCHEDULES.get(schedule.value), "warmup_steps": 2}
    plain, split = train_both(tmp_path, gradient_accumulation_steps=2, **changes)
    assert_same_training(plain, split)


def test_label_smoothing_applies_to_the_next_token(tmp_path):
    changes = {"label_smoothing_factor": 0.1, "eval_strategy": "epoch", "eval_dataset": rows_of(9)}
    plain, split = train_both(tmp_path, gradient_accumulation_steps=2, **changes)
    assert_same_training(plain, split)
    unsmoothed, _ = train_both(tmp_path / "unsmoothed")
    assert max((values(split)[name] - value).abs().max() for name, value in values(unsmoothed).items()) > 1e-3


def test_label_smoothing_of_unknown_model_class_is_rejected(tmp_path):
    class UnknownModel(LlamaForCausalLM):
        pass

    args = arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="Trainer does not recognize UnknownModel as a causal language model"):
        SplitFederatedTrainer(UnknownModel(whole_model().config), args, train_dataset=rows_of(0))


def tripled_loss(logits, labels, vocab_size, **kwargs):
    return 3 * torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def custom_loss_model() -> LlamaForCausalLM:
    model = whole_model()
    model.loss_function = tripled_loss
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_custom_loss_function_of_model_is_used_or_rejected(strategy, tmp_path):
    if strategy == "client_batch":
        with pytest.raises(ValueError, match="custom `loss_function`"):
            SplitFederatedTrainer(
                custom_loss_model(),
                arguments(tmp_path),
                train_dataset=clients_of(2, 2),
                split=SplitConfig(strategy),
            )
        return
    plain = Trainer(custom_loss_model(), arguments(tmp_path), train_dataset=rows_of(0))
    split = SplitFederatedTrainer(
        custom_loss_model(), arguments(tmp_path), train_dataset=rows_of(0), split=SplitConfig(strategy)
    )
    for trainer in (plain, split):
        trainer.train()
    assert logged(plain, "loss")[0] > 9
    assert_same_training(plain, split)


def test_replaced_module_is_rejected_and_hook_logs_a_warning(monkeypatch):
    model = whole_model()
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.act_fn is a ReLU.* create a SiLU"):
        SplitModel.from_model(model)
    warnings = []
    monkeypatch.setattr("hf_federated.split.splitting.logger.warning", warnings.append)
    model = whole_model()
    model.enable_input_require_grads()
    model(torch.tensor([[3, 4]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.model.layers)
    SplitModel.from_model(model)
    assert not warnings
    model.model.layers[2].register_forward_hook(lambda *args: None)
    SplitModel.from_model(model)
    assert len(warnings) == 1 and "Hooks on model.layers.2 are not run" in warnings[0]


def test_quantized_model_is_rejected(tmp_path):
    model = whole_model()
    model.save_pretrained(tmp_path)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    model.config.save_pretrained(tmp_path)
    for model_or_name in (model, str(tmp_path)):
        with pytest.raises(ValueError, match="A quantized model"):
            SplitModel.from_model(model_or_name)


@pytest.mark.parametrize("is_object", [False, True])
def test_dequantized_weights_of_a_gguf_file_can_be_split(is_object, tmp_path):
    """transformers leaves the config of the quantization when it has dequantized the weights of a GGUF file."""

    class GgufConfig(QuantizationConfigMixin):
        def __init__(self) -> None:
            self.quant_method, self.dequantize = "gguf", False

    model = whole_model()
    left = model.config.quantization_config = GgufConfig() if is_object else {"quant_method": "gguf"}
    split = SplitModel.from_model(model)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(split(ids).logits, model(ids).logits)
    # The saved model is not a GGUF file.
    split.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert model.config.quantization_config is left


def test_weights_in_blocks_of_a_gguf_file_are_rejected():
    model = whole_model()
    model.config.quantization_config = {"quant_method": "gguf"}
    packed = torch.zeros(16, 17, dtype=torch.uint8)
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(ValueError, match=r"Load a GGUF file with GgufConfig\(dequantize=True\)"):
        SplitModel.from_model(model)


class CustomSamplerTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class CustomLoaderTrainer(SplitFederatedTrainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


@pytest.mark.parametrize("trainer_class", [CustomSamplerTrainer, CustomLoaderTrainer])
def test_overridden_sampling_is_rejected(trainer_class, tmp_path):
    trainer_class = (
        trainer_class if issubclass(trainer_class, SplitFederatedTrainer) else split_federate(trainer_class)
    )
    with pytest.raises(TypeError, match="overrides the sampling of training examples"):
        trainer_class(whole_model(), arguments(tmp_path), train_dataset=rows_of(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"accelerator_config": {"use_seedable_sampler": False}},
            "the seed determines the order of each client",
        ),
        ({"optim": "schedule_free_adamw"}, "does not support optim='schedule_free_adamw'"),
        ({"optim": "lomo"}, "an optimizer that steps with all parties"),
        ({"optim": "galore_adamw_layerwise"}, "an optimizer that steps with all parties"),
    ],
)
def test_unsupported_training_arguments_are_rejected(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        SplitFederatedTrainer(whole_model(), arguments(tmp_path, **changes), train_dataset=rows_of(0))


@pytest.mark.parametrize("num_clients", [1, 2])
def test_evaluation_with_beams_generates_the_texts_of_the_unsplit_model(num_clients, tmp_path):
    rows = rows_of(0, 6, 5)
    generated = []
    for number, base_class in enumerate((Seq2SeqTrainer, split_federate(Seq2SeqTrainer))):
        args = Seq2SeqTrainingArguments(
            str(tmp_path / str(number)),
            generation_num_beams=3,
            generation_max_length=12,
            predict_with_generate=True,
            per_device_eval_batch_size=4,
            report_to=[],
            use_cpu=True,
        )
        train = rows if number == 0 else clients_of(*[6] * num_clients)
        model = whole_model(pad_token_id=0, initializer_range=0.5)  # small weights give almost equal beams
        trainer = base_class(model, args, train_dataset=train)
        generated.append(trainer.predict(rows).predictions)
    assert np.array_equal(*generated)
    assert not np.array_equal(trainer.predict(rows, num_beams=1).predictions, generated[0])


class OptimizerWithModes(torch.optim.SGD):
    def train(self):
        pass


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ((torch.optim.SGD, {"params": [], "lr": 0.1}), "has 'params'"),
        ((OptimizerWithModes, {"lr": 0.1}), "has training and evaluation modes"),
    ],
)
def test_optimizer_class_that_cannot_be_created_per_party_is_rejected(optimizer, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        SplitFederatedTrainer(
            whole_model(), arguments(tmp_path), train_dataset=rows_of(0), optimizer_cls_and_kwargs=optimizer
        )


def test_only_non_reentrant_checkpointing_is_supported(tmp_path):
    plain, split = train_both(
        tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False}
    )
    assert_same_training(plain, split)
    with pytest.raises(ValueError, match="set use_reentrant=False"):
        train_both(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True})


def test_unsupported_column_of_the_model_raises_an_error(tmp_path):
    rows = rows_of(0)
    with_token_types = rows.add_column("token_type_ids", [[5] * 7] * len(rows))
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=4, n_head=2, n_positions=64)
    trainer = SplitFederatedTrainer(GPT2LMHeadModel(config), arguments(tmp_path), train_dataset=with_token_types)
    with pytest.raises(TypeError, match="does not support the arguments \\['token_type_ids'\\]"):
        trainer.train()
    # Llama does not accept the column, and `Trainer` removes it.
    plain, split = train_both(tmp_path, rows=with_token_types)
    assert_same_training(plain, split)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_token_and_sample_counts_are_those_of_unsplit_model(strategy, tmp_path, monkeypatch):
    # Each call of the clock advances by one second, so that counts can be computed from rates.
    for module in ("transformers.trainer_utils", "transformers.trainer"):
        monkeypatch.setattr(f"{module}.time.time", iter(range(10_000)).__next__)
    changes = {"include_num_input_tokens_seen": "all", "max_steps": 3, "gradient_accumulation_steps": 2}
    plain = Trainer(whole_model(), arguments(tmp_path, **changes), train_dataset=rows_of(0, 12))
    split = SplitFederatedTrainer(
        whole_model(),
        arguments(tmp_path, **changes, **({} if strategy == "serial" else {"per_device_train_batch_size": 1})),
        # Each step has four examples.
        train_dataset=clients_of(*((4, 8) if strategy == "serial" else (6, 6))),
        split=SplitConfig(strategy=strategy),
    )
    counts = []
    for trainer in (plain, split):
        metrics = trainer.train().metrics
        samples = metrics["train_samples_per_second"] * metrics["train_runtime"]
        counts.append((logged(trainer, "num_input_tokens_seen"), round(samples)))
    assert counts[0] == counts[1] == ([28, 56, 84, 84], 12)


def test_unsupported_generation_modes_name_an_alternative():
    split = SplitModel.from_model(whole_model())
    with pytest.raises(ValueError, match="Remove the arguments of assisted generation"):
        split.generate(torch.tensor([[3, 4]]), prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="Set num_beam_groups=1"):
        split.generate(torch.tensor([[3, 4]]), num_beams=2, num_beam_groups=2)


def test_split_sft_trainer_with_an_old_trl_names_both_versions(monkeypatch):
    trl = pytest.importorskip("trl")

    class OwnSFTTrainer(trl.SFTTrainer):
        pass

    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"trl": "1.15.0"}[name])
    with pytest.raises(ImportError, match=r"needs trl>=1\.16, but trl 1\.15\.0 is installed"):
        split_federate(OwnSFTTrainer)
