"""`split_federate(SFTTrainer)`: TRL's trainer with its data preparation, loss and metrics, on a split model."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import networked
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from language import WORDS, language_model, texts, tokenizer
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model, get_peft_model_state_dict
from split_runs import STRATEGIES, assert_close
from transformers import LlamaForCausalLM, Trainer

from hf_federated import FederatedDataset, SplitConfig, SplitModel, split_federate
from hf_federated.split.per_token import score_targets


trl = pytest.importorskip("trl", minversion="1.16", reason="split_federate(SFTTrainer) needs trl>=1.16")

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
CLIENTS = {"north": texts("north", 10), "south": texts("south", 6)}
LOGGED = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss")


def whole_model() -> LlamaForCausalLM:
    """Model with four layers, with equal weights at each call."""
    config = language_model().config
    config.num_hidden_layers = 4
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def lora_model() -> PeftModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(whole_model(), LORA)


def prompts(client_id: str, num_rows: int) -> Dataset:
    """Prompt-completion dataset."""
    words = WORDS[client_id]
    return Dataset.from_dict(
        {
            "prompt": [" ".join(words[i % 5 : i % 5 + 2]) for i in range(num_rows)],
            "completion": [f" {words[(3 * i) % 12]} {words[i % 12]}" for i in range(num_rows)],
        }
    )


def arguments(directory: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "gradient_checkpointing": False,
        "learning_rate": 1e-2,
        "num_train_epochs": 2,
        "max_length": 16,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        **changes,
    }
    return trl.SFTConfig(**values)


def trained(trainer_class: type, directory, create_model=whole_model, rows=None, eval_rows=None, **changes) -> Any:
    settings = {name: changes.pop(name) for name in ("split", "peft_config") if name in changes}
    trainer = trainer_class(
        model=create_model(),
        args=arguments(directory, **changes),
        train_dataset=texts("north", 10) if rows is None else rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer(),
        **settings,
    )
    trainer.train()
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    model = trainer.model
    if isinstance(model, PeftModel):
        return get_peft_model_state_dict(model)
    return dict(model.named_parameters())


def assert_same_training(split: Any, plain: Any, directory) -> None:
    """Check that a split trainer gives the weights and logs of a plain trainer."""
    split.model.save_pretrained(directory)
    if isinstance(plain.model, PeftModel):
        split_weights = get_peft_model_state_dict(PeftModel.from_pretrained(whole_model(), directory))
    else:
        split_weights = dict(LlamaForCausalLM.from_pretrained(directory).named_parameters())
    # TRL's kernel sums the loss in another order. Adam amplifies the difference if a gradient is nearly zero.
    assert_close(split_weights, weights(plain), 1e-4)
    for name in LOGGED:
        split_values, plain_values = (
            [log[name] for log in trainer.state.log_history if name in log] for trainer in (split, plain)
        )
        assert split_values == pytest.approx(plain_values, abs=2e-5), name
        assert split_values or name == "eval_loss"


@pytest.mark.parametrize("create_model", [whole_model, lora_model])
@pytest.mark.parametrize(
    "changes",
    [
        {"eval_strategy": "epoch"},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"loss_type": "dft"},
        {"packing": True, "max_length": 12},
        {"packing_strategy": "wrapped", "packing": True, "max_length": 12},
        {"padding_free": True, "max_length": None},
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.sampled(6)
def test_single_client_trains_as_plain_sft_trainer(create_model, changes, tmp_path):
    eval_rows = texts("north", 5) if "eval_strategy" in changes else None
    plain, split = (
        trained(kind, tmp_path / kind.__name__, create_model, eval_rows=eval_rows, **changes)
        for kind in (trl.SFTTrainer, split_federate(trl.SFTTrainer))
    )
    assert isinstance(split.model, SplitModel)
    assert_same_training(split, plain, tmp_path / "saved")


def test_completion_only_loss_is_that_of_plain_sft_trainer(tmp_path):
    rows = prompts("north", 9)
    plain, split = (
        trained(kind, tmp_path / kind.__name__, rows=rows) for kind in (trl.SFTTrainer, split_federate(trl.SFTTrainer))
    )
    assert_same_training(split, plain, tmp_path / "saved")


def test_assistant_only_loss_is_that_of_plain_sft_trainer(tmp_path):
    template = (
        "{% for turn in messages %}{% if turn.role == 'assistant' %}{% generation %}{{ turn.content + ' ' }}"
        "{% endgeneration %}{% else %}{{ turn.content + ' ' }}{% endif %}{% endfor %}"
    )
    words = WORDS["north"]
    rows = Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": " ".join(words[i % 4 : i % 4 + 2])},
                    {"role": "assistant", "content": " ".join(words[i % 3 : i % 3 + 1 + i % 2])},
                ]
            }
            for i in range(7)
        ]
    )
    changes = {"assistant_only_loss": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    runs = []
    for kind in (trl.SFTTrainer, split_federate(trl.SFTTrainer)):
        own_tokenizer = tokenizer()
        own_tokenizer.chat_template = template
        args = arguments(tmp_path / kind.__name__, **changes)
        runs.append(kind(model=whole_model(), args=args, train_dataset=rows, processing_class=own_tokenizer))
        runs[-1].train()
    assert_same_training(runs[1], runs[0], tmp_path / "saved")


@pytest.mark.parametrize(
    "changes", [{}, {"loss_type": "dft"}, {"packing": True, "max_length": 12}], ids=["nll", "dft", "packed"]
)
def test_client_batch_step_equals_plain_step_on_all_examples(changes, tmp_path):
    rows = {client_id: prompts(client_id, 8) for client_id in CLIENTS}
    step = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0, **changes}
    split = SplitConfig("client_batch", average_every=1)
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    batched = trained(split_federate(trl.SFTTrainer), tmp_path / "met", rows=rows, split=split, **sizes, **step)
    simultaneous = concatenate_datasets(list(rows.values()))
    plain = trained(trl.SFTTrainer, tmp_path / "all", rows=simultaneous, per_device_train_batch_size=16, **step)
    batched.model.save_pretrained(tmp_path / "saved")
    split_weights = dict(LlamaForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    assert_close(split_weights, weights(plain), 1e-6)
    moved = {name: (value - weights(plain)[name]).abs().max() for name, value in whole_model().named_parameters()}
    assert max(moved.values()) > 5e-5


@pytest.mark.parametrize("strategy", ["client_batch", "server_hierarchical"])
@pytest.mark.parametrize("networked_run", [False, True])
def test_padding_free_batches_have_the_weight_of_padded_batches(networked_run, strategy, tmp_path, monkeypatch):
    # The clients have 8 and 1 examples and weights 8 and 1. A padding-free batch has one row.
    rows = {"north": texts("north", 8), "south": texts("south", 1)}
    step = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0, "per_device_train_batch_size": 8, "max_length": None}
    split = SplitConfig(strategy, average_every=1)
    weights_by_run = []
    for padding_free in (False, True):
        changes = {**step, "padding_free": padding_free}
        if networked_run:
            sft = functools.partial(split_federate(trl.SFTTrainer), processing_class=tokenizer())
            monkeypatch.setattr(networked, "SplitFederatedTrainer", sft)
            monkeypatch.setattr(networked, "arguments", arguments)
            run = networked.Run(tmp_path / str(padding_free), rows, split, model=whole_model(), **changes)
            run.train()
            assert not run.errors
            weights_by_run.append({name: value for party in run.values().values() for name, value in party.items()})
        else:
            run = trained(split_federate(trl.SFTTrainer), tmp_path, rows=rows, split=split, **changes)
            weights_by_run.append(dict(run.model.named_parameters()))
    assert_close(weights_by_run[1], weights_by_run[0], 1e-6)


def test_best_model_can_be_selected_by_trl_metric(tmp_path):
    best = {"metric_for_best_model": "eval_mean_token_accuracy", "load_best_model_at_end": True}
    each = {"eval_strategy": "epoch", "save_strategy": "epoch", **best}
    seen = []

    class RecordingTrainer(trl.SFTTrainer):
        def evaluate(self, *args, **kwargs):
            seen.append(super().evaluate(*args, **kwargs))
            return seen[-1]

    plain, split = (
        trained(kind, tmp_path / kind.__name__, eval_rows=texts("north", 5), **each)
        for kind in (trl.SFTTrainer, split_federate(RecordingTrainer))
    )
    assert split.state.best_metric == pytest.approx(plain.state.best_metric) and split.state.best_metric > 0
    assert len(seen) == 2 and not any(name.startswith("federated/") for metrics in seen for name in metrics)


def test_federated_dataset_is_evaluated_and_predicted_as_one_dataset(tmp_path):
    tokens = {"input_ids": [[3, 4, 5]], "labels": [[3, 4, 5]]}
    both = FederatedDataset.from_dict({client_id: Dataset.from_dict(tokens) for client_id in CLIENTS})
    trainer = trained(split_federate(trl.SFTTrainer), tmp_path, max_steps=1)
    assert trainer.predict(both).label_ids.tolist() == [[3, 4, 5]] * 2
    assert trainer.evaluate({"both": both})["eval_both_loss"] == trainer.evaluate(both)["eval_loss"]


def test_loss_of_the_whole_model_is_rejected(tmp_path):
    class WholeModelLoss(trl.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return self.model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss

    class Regularized(trl.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return loss + sum(parameter.square().sum() for parameter in self.model.parameters())

    for trainer_class in (WholeModelLoss, Regularized):
        with pytest.raises(ValueError, match="has gradients in `self.model`"):
            trained(split_federate(trainer_class), tmp_path)


def test_gradients_from_before_training_are_ignored(tmp_path):
    class BackwardBeforeTraining(trl.SFTTrainer):
        def train(self, *args, **kwargs):
            self.model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
            return super().train(*args, **kwargs)

    assert_close(
        weights(trained(split_federate(BackwardBeforeTraining), tmp_path)),
        weights(trained(split_federate(trl.SFTTrainer), tmp_path)),
        0.0,
    )


def test_client_without_remaining_examples_is_named(tmp_path):
    # Prompts that fill `max_length` leave no target tokens.
    long = {"prompt": [" ".join(WORDS["south"][:6])] * 2, "completion": [" x"] * 2}
    rows = {"north": prompts("north", 4), "south": Dataset.from_dict(long)}
    with pytest.raises(ValueError, match="'south': all 2 examples were dropped.*max_length=4"):
        trained(split_federate(trl.SFTTrainer), tmp_path, rows=rows, max_length=4)


def test_packed_batch_can_be_longer_than_the_position_limit(tmp_path):
    # A packed batch is one row of four times 16 tokens, and the positions restart in each sequence.
    def short():
        model = whole_model()
        model.config.max_position_embeddings = 16
        return model

    rows = texts("north", 40)
    plain, split = (
        trained(kind, tmp_path / kind.__name__, short, rows, packing=True, max_length=16)
        for kind in (trl.SFTTrainer, split_federate(trl.SFTTrainer))
    )
    assert_same_training(split, plain, tmp_path / "saved")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_can_be_passed_by_name(dtype, tmp_path):
    # TRL loads models in float32, independently of the dtype of the checkpoint.
    whole_model().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    args = {"max_steps": 2, "model_init_kwargs": {"dtype": dtype} if dtype == "bfloat16" else None}
    settings = {"model": str(tmp_path / "model"), "train_dataset": texts("north", 10)}
    plain, split = (
        kind(args=arguments(tmp_path / kind.__name__, **args), **settings)
        for kind in (trl.SFTTrainer, split_federate(trl.SFTTrainer))
    )
    for trainer in (plain, split):
        assert {value.dtype for value in trainer.model.parameters()} == {getattr(torch, dtype)}
        trainer.train()
    losses = [[log["loss"] for log in trainer.state.log_history if "loss" in log] for trainer in (plain, split)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5 if dtype == "float32" else 2e-2)
    with pytest.raises(ValueError, match="A quantized model cannot be split"):
        split_federate(trl.SFTTrainer)(**settings, args=arguments(tmp_path), quantization_config=object())
    revision = arguments(tmp_path, model_init_kwargs={"revision": "v1"})
    with pytest.raises(ValueError, match="'v1', but `processing_class` is missing"):
        split_federate(trl.SFTTrainer)(**settings, args=revision)
    with pytest.raises(ValueError, match="has type str.*To split a checkpoint by its name, use SplitModel.from_model"):
        split_federate(Trainer)(**settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dataset_of_each_client_is_prepared_once_and_separately(strategy, tmp_path):
    class RecordingTrainer(trl.SFTTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.prepared: list[tuple[str, int]] = []
            super().__init__(*args, **kwargs)

        def _prepare_dataset(self, dataset, *args, **kwargs):
            self.prepared.append((args[-1], len(dataset)))
            return super()._prepare_dataset(dataset, *args, **kwargs)

    eval_rows = FederatedDataset.from_dict({"north": texts("north", 3), "south": texts("south", 2)})
    trainer = trained(
        split_federate(RecordingTrainer),
        tmp_path,
        rows=CLIENTS,
        eval_rows=eval_rows,
        eval_strategy="epoch",
        split=SplitConfig(strategy, average_every=2),
        peft_config=LORA,
    )
    assert sorted(trainer.prepared) == [("eval", 5), ("train", 6), ("train", 10)]
    history = trainer.state.log_history
    assert [log["eval_loss"] for log in history if "eval_loss" in log][1] < history[0]["loss"]
    assert all(0 <= log["mean_token_accuracy"] <= 1 for log in history if "loss" in log)
    assert all("eval_mean_token_accuracy" in log for log in history if "eval_loss" in log)
    assert trainer.model.adapter_config.peft_type == "LORA"
    assert trainer.evaluate(eval_rows)["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])


def test_resumed_run_gives_identical_weights(tmp_path):
    settings = {"rows": CLIENTS, "peft_config": LORA, "split": SplitConfig(), "save_strategy": "epoch"}
    whole = trained(split_federate(trl.SFTTrainer), tmp_path / "whole", **settings)
    resumed = trained(split_federate(trl.SFTTrainer), tmp_path / "other", **settings)
    resumed.args.output_dir = whole.args.output_dir
    step = whole.state.global_step // 2
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert_close(dict(resumed.model.named_parameters()), dict(whole.model.named_parameters()), 0.0)
    assert "SplitFederatedSFTTrainer" not in (tmp_path / "whole" / "README.md").read_text()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_networked_run_gives_identical_weights_to_run_in_one_process(strategy, tmp_path, monkeypatch):
    split = SplitConfig(strategy, average_every=2)
    packed = {"packing": True, "max_length": 12}
    sft = functools.partial(split_federate(trl.SFTTrainer), processing_class=tokenizer())
    monkeypatch.setattr(networked, "SplitFederatedTrainer", sft)
    monkeypatch.setattr(networked, "arguments", arguments)
    run = networked.Run(tmp_path, CLIENTS, split, LORA, model=whole_model(), **packed)
    run.train()
    assert not run.errors and run.server.finished.is_set()
    model = SplitModel.from_model(whole_model())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.add_adapter(copy.deepcopy(LORA))
    args = arguments(tmp_path / "one", **packed)
    reference = sft(model=model, args=args, train_dataset=CLIENTS, split=split)
    reference.train()
    expected = dict(reference.model.named_parameters())
    for client_id in CLIENTS:
        assert all(torch.equal(value, expected[name]) for name, value in run.values()[client_id].items())


def test_adapter_from_config_is_determined_by_the_seed(tmp_path):
    first, same, other = (
        trained(split_federate(trl.SFTTrainer), tmp_path / str(number), peft_config=LORA, seed=seed, max_steps=1)
        for number, seed in enumerate((0, 0, 1))
    )
    parameters = [dict(trainer.model.named_parameters()) for trainer in (first, same, other)]
    assert_close(parameters[0], parameters[1], 0.0)
    assert any(not torch.equal(parameters[0][name], parameters[2][name]) for name in parameters[0] if "lora_A" in name)
    with pytest.raises(ValueError, match="one adapter"):
        trained(split_federate(trl.SFTTrainer), tmp_path, lora_model, peft_config=LORA)


def test_unsupported_trainers_and_adapters_are_rejected(tmp_path):
    with pytest.raises(TypeError, match="DPOTrainer cannot be split"):
        split_federate(trl.DPOTrainer)
    prefix = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="packed into one row.*would attend to each other"):
        trained(split_federate(trl.SFTTrainer), tmp_path, peft_config=prefix, packing=True, max_length=12)

    class MappingTrainer(trl.SFTTrainer):
        def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, train_dataset=train_dataset.map(lambda row: row), **kwargs)

    with pytest.raises((ValueError, TypeError), match="MappingTrainer"):
        trained(split_federate(MappingTrainer), tmp_path)

    class ForwardPatchingTrainer(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model.forward = lambda **inputs: None

    with pytest.raises(TypeError, match="replaces the forward method of the model"):
        split_federate(ForwardPatchingTrainer)(whole_model(), arguments(tmp_path), train_dataset=texts("north", 2))


def test_target_scores_equal_scores_of_full_logits():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 5, dtype=torch.float64)
    labels = torch.tensor([[1, 2, -100, 4], [0, -100, -100, -100]])
    scores = score_targets(logits, labels)
    probabilities = logits.softmax(-1)
    assert scores.label_mask.tolist() == [[True, False, True], [False, False, False]]
    for position, target in ((0, 2), (2, 4)):
        position_probabilities = probabilities[0, position]
        assert scores.log_probs[0, position].item() == pytest.approx(
            position_probabilities[target].log().item(), abs=1e-5
        )
        assert scores.entropy[0, position].item() == pytest.approx(
            -(position_probabilities * position_probabilities.log()).sum().item(), abs=1e-5
        )
        assert scores.is_top1[0, position].item() == float(position_probabilities.argmax() == target)
    assert scores.log_probs[~scores.label_mask].abs().sum() == 0 == scores.entropy[~scores.label_mask].sum()
    assert scores.loss.item() == pytest.approx(-scores.log_probs.sum().item() / 2)
    assert score_targets(logits, labels, num_items_in_batch=8).loss.item() == pytest.approx(scores.loss.item() / 4)
    shifted = score_targets(logits, None, labels)
    assert shifted.log_probs[0, 1].item() == pytest.approx(probabilities[0, 1, 2].log().item(), abs=1e-5)
    assert score_targets(logits, torch.full_like(labels, -100)).loss == 0
    with pytest.raises(ValueError, match="give `labels`"):
        score_targets(logits, None)
