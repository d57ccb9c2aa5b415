"""What a script may ask of `Trainer`, against plain `Trainer` on the unsplit model: done alike, or refused by name."""

from __future__ import annotations

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

from hf_federated import SplitConfig, SplitFederatedTrainer, SplitModel, split_federate


SCHEDULES = {
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 2},
}
# Without a schedule, and with one that follows evaluations.
NOT_A_SCHEDULE = {SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY}


def ragged(num_rows: int = 8) -> Dataset:
    """Rows of which no two batches have as many target tokens."""
    rows = rows_of(0, num_rows, 9).to_dict()
    labels = [[-100] * (number % 5) + own[number % 5 :] for number, own in enumerate(rows["labels"])]
    return Dataset.from_dict({"input_ids": rows["input_ids"], "labels": labels})


def both(directory, make=whole_model, base=Trainer, rows=None, eval_dataset=None, **changes):
    """A plain trainer and a split one of one client after the same training."""
    rows = ragged() if rows is None else rows
    made = []
    for number, kind in enumerate((base, split_federate(base))):
        args = arguments(directory / str(number), **{"weight_decay": 0.1, "num_train_epochs": 2, **changes})
        trainer = kind(make(), args, train_dataset=rows, eval_dataset=eval_dataset)
        trainer.train()
        made.append(trainer)
    return made


def values(trainer) -> dict[str, torch.Tensor]:
    model = trainer.model
    if not isinstance(model, SplitModel):
        return dict(model.named_parameters())
    return {name: own for part in model.parts for name, own in part.named_original_parameters()}


def logged(trainer, name):
    return [own[name] for own in trainer.state.log_history if name in own]


def assert_alike(plain, split, tolerance=1e-6):
    assert_close(values(split), values(plain), tolerance)
    for name in ("loss", "eval_loss", "learning_rate", "grad_norm"):
        assert logged(split, name) == pytest.approx(logged(plain, name), abs=1e-5), name
    assert logged(split, "loss")


@pytest.mark.parametrize("schedule", [own for own in SchedulerType if own not in NOT_A_SCHEDULE])
def test_every_schedule_is_trainers(schedule, tmp_path):
    changes = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": SCHEDULES.get(schedule.value), "warmup_steps": 2}
    plain, split = both(tmp_path, gradient_accumulation_steps=2, **changes)
    assert_alike(plain, split)


def test_smoothed_labels_are_those_of_the_next_token(tmp_path):
    changes = {"label_smoothing_factor": 0.1, "eval_strategy": "epoch", "eval_dataset": rows_of(9)}
    plain, split = both(tmp_path, gradient_accumulation_steps=2, **changes)
    assert_alike(plain, split)
    unsmoothed, _ = both(tmp_path / "unsmoothed")
    assert max((values(split)[name] - own).abs().max() for name, own in values(unsmoothed).items()) > 1e-3


def test_smoothing_is_refused_where_trainer_would_not_shift(tmp_path):
    class Other(LlamaForCausalLM):
        pass

    args = arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="Trainer does not know Other for a causal language model"):
        SplitFederatedTrainer(Other(whole_model().config), args, train_dataset=rows_of(0))


def tripled(logits, labels, vocab_size, **kwargs):
    return 3 * torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def with_a_loss() -> LlamaForCausalLM:
    model = whole_model()
    model.loss_function = tripled
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_models_own_loss_function_is_the_splits(strategy, tmp_path):
    if strategy == "client_batch":
        with pytest.raises(ValueError, match="`loss_function` of the model's own"):
            SplitFederatedTrainer(
                with_a_loss(), arguments(tmp_path), train_dataset=clients_of(2, 2), split=SplitConfig(strategy)
            )
        return
    plain = Trainer(with_a_loss(), arguments(tmp_path), train_dataset=rows_of(0))
    split = SplitFederatedTrainer(
        with_a_loss(), arguments(tmp_path), train_dataset=rows_of(0), split=SplitConfig(strategy)
    )
    for trainer in (plain, split):
        trainer.train()
    assert logged(plain, "loss")[0] > 9
    assert_alike(plain, split)


def test_a_replaced_module_is_refused_and_a_hook_is_told(monkeypatch):
    model = whole_model()
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.act_fn is a ReLU.* has a SiLU"):
        SplitModel.from_model(model)
    told = []
    monkeypatch.setattr("hf_federated.split.model_checks.logger.warning", told.append)
    model = whole_model()
    model.enable_input_require_grads()
    model(torch.tensor([[3, 4]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.model.layers)
    SplitModel.from_model(model)
    assert not told
    model.model.layers[2].register_forward_hook(lambda *given: None)
    SplitModel.from_model(model)
    assert len(told) == 1 and "Hooks on model.layers.2 are not run" in told[0]


def test_a_quantized_model_is_refused_by_name(tmp_path):
    model = whole_model()
    model.save_pretrained(tmp_path)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    model.config.save_pretrained(tmp_path)
    for own in (model, str(tmp_path)):
        with pytest.raises(ValueError, match="A quantized model"):
            SplitModel.from_model(own)


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class OwnLoader(SplitFederatedTrainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


@pytest.mark.parametrize("kind", [OwnSampler, OwnLoader])
def test_rows_drawn_in_a_way_of_ones_own_are_refused(kind, tmp_path):
    kind = kind if issubclass(kind, SplitFederatedTrainer) else split_federate(kind)
    with pytest.raises(TypeError, match="draws rows in its own way"):
        kind(whole_model(), arguments(tmp_path), train_dataset=rows_of(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accelerator_config": {"use_seedable_sampler": False}}, "follows from the seed"),
        ({"optim": "schedule_free_adamw"}, "optim='schedule_free_adamw' is not supported"),
        ({"optim": "lomo"}, "steps when all parties do"),
        ({"optim": "galore_adamw_layerwise"}, "steps when all parties do"),
    ],
)
def test_arguments_that_would_mean_something_else_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        SplitFederatedTrainer(whole_model(), arguments(tmp_path, **changes), train_dataset=rows_of(0))


def test_a_beam_search_is_refused_before_the_first_evaluation(tmp_path):
    args = Seq2SeqTrainingArguments(str(tmp_path), generation_num_beams=2, report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="generation_num_beams is not supported in a split"):
        split_federate(Seq2SeqTrainer)(whole_model(), args, train_dataset=rows_of(0))


class WithModes(torch.optim.SGD):
    def train(self):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.optim.SGD, {"params": [], "lr": 0.1}), "has 'params'"),
        ((WithModes, {"lr": 0.1}), "modes for training and evaluation"),
    ],
)
def test_optimizer_classes_that_cannot_be_each_partys_are_refused(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        SplitFederatedTrainer(
            whole_model(), arguments(tmp_path), train_dataset=rows_of(0), optimizer_cls_and_kwargs=given
        )


def test_reentrant_checkpointing_is_refused_and_the_other_changes_nothing(tmp_path):
    plain, split = both(
        tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False}
    )
    assert_alike(plain, split)
    with pytest.raises(ValueError, match="set use_reentrant=False"):
        both(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True})


def test_columns_that_only_the_whole_model_takes_are_not_dropped_in_silence(tmp_path):
    rows = rows_of(0)
    more = rows.add_column("token_type_ids", [[5] * 7] * len(rows))
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=4, n_head=2, n_positions=64)
    trainer = SplitFederatedTrainer(GPT2LMHeadModel(config), arguments(tmp_path), train_dataset=more)
    with pytest.raises(TypeError, match="does not support the arguments \\['token_type_ids'\\]"):
        trainer.train()
    # Llama does not take them either, and leaves them out as ever.
    plain, split = both(tmp_path, rows=more)
    assert_alike(plain, split)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_and_samples_are_counted_as_of_the_unsplit_model(strategy, tmp_path, monkeypatch):
    # A second for everything, so that a rate is a count.
    for module in ("transformers.trainer_utils", "transformers.trainer"):
        monkeypatch.setattr(f"{module}.time.time", iter(range(10_000)).__next__)
    changes = {"include_num_input_tokens_seen": "all", "max_steps": 3, "gradient_accumulation_steps": 2}
    plain = Trainer(whole_model(), arguments(tmp_path, **changes), train_dataset=rows_of(0, 12))
    split = SplitFederatedTrainer(
        whole_model(),
        arguments(tmp_path, **changes, **({} if strategy == "serial" else {"per_device_train_batch_size": 1})),
        # Each step is of four rows.
        train_dataset=clients_of(*((4, 8) if strategy == "serial" else (6, 6))),
        split=SplitConfig(strategy=strategy),
    )
    counts = []
    for trainer in (plain, split):
        metrics = trainer.train().metrics
        samples = metrics["train_samples_per_second"] * metrics["train_runtime"]
        counts.append((logged(trainer, "num_input_tokens_seen"), round(samples)))
    assert counts[0] == counts[1] == ([28, 56, 84, 84], 12)


def test_ways_to_generate_with_a_second_model_are_refused_with_what_to_do():
    split = SplitModel.from_model(whole_model())
    with pytest.raises(ValueError, match="Remove the arguments of assisted generation"):
        split.generate(torch.tensor([[3, 4]]), prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="Set num_beams=1"):
        split.generate(torch.tensor([[3, 4]]), num_beams=2)
