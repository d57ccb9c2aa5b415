"""What would fail in the first round, or have no effect in the run, is reported before any client trains."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from datasets import Dataset
from federations import CLIENTS, build_federation
from tiny import arguments, rows, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback
from transformers.training_args import OptimizerNames

from hf_federated import FederatedTrainer, RoundFailedError
from hf_federated.tasks import TextClassification
from hf_federated.trainer.checks.first_round import num_checkpoints
from hf_federated.utils.due_steps import DEFAULT_STEPS, describe_undue_steps, warn_once
from hf_federated.utils.optimizer_packages import PACKAGES, check_optimizer_package
from hf_federated.utils.storage import StorageError, check_free_space


STRATEGIES = ("logging_strategy", "eval_strategy", "save_strategy")


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    warn_once.cache_clear()


# ---- Steps that are never due


def test_steps_longer_than_the_run_are_reported_once_with_the_numbers_to_set(tmp_path, caplog) -> None:
    settings = {"load_best_model_at_end": True, **dict.fromkeys(STRATEGIES, "steps")}
    steps = dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), 50)
    for _ in range(2):
        trainer = build_federation(tmp_path, num_rounds=3, trainer={"eval_dataset": rows(4)}, **settings, **steps)
    (text,) = [record.message for record in caplog.records if "count rounds" in record.message]
    assert text.startswith("logging_steps=50, eval_steps=50 and save_steps=50 count rounds, and the run has 3: ")
    assert "the best model is the last model. Set them to a number from 1 to 3, or to 500" in text
    trainer.train()
    log = trainer.state.log_history
    assert not any("loss" in entry for entry in log) and sum("eval_loss" in entry for entry in log) == 1


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, DEFAULT_STEPS, 0.4])
def test_the_report_agrees_with_what_a_run_of_three_rounds_logs(tmp_path, steps) -> None:
    trainer = build_federation(tmp_path, num_rounds=3, logging_strategy="steps", logging_steps=steps)
    trainer.train()
    has_loss = any("loss" in entry for entry in trainer.state.log_history)
    assert has_loss == (describe_undue_steps(trainer.args, 3) is None)


def test_steps_of_a_strategy_that_is_not_used_are_not_reported(tmp_path) -> None:
    unused = {"logging_strategy": "epoch", "eval_strategy": "no", "save_strategy": "no"}
    args = arguments(tmp_path, **unused, logging_steps=50, eval_steps=50, save_steps=50)
    assert describe_undue_steps(args, 3) is None
    first = arguments(
        tmp_path, logging_strategy="steps", logging_steps=50, logging_first_step=True, save_strategy="no"
    )
    assert describe_undue_steps(first, 3) is None


# ---- Optimizers


@pytest.mark.parametrize("optim", [item.value for item in OptimizerNames])
def test_an_optimizer_is_refused_exactly_if_transformers_cannot_import_it(tmp_path, optim) -> None:
    args = arguments(tmp_path, optim=optim, optim_target_modules="all-linear")
    try:
        Trainer.get_optimizer_cls_and_kwargs(args, tiny_model())
        is_available = True
    except (ImportError, ValueError, RuntimeError) as error:
        is_available = not any(word in str(error) for word in ("install", "import"))
    try:
        check_optimizer_package(optim)
        found = True
    except ImportError as error:
        found = False
        assert f"optim='{optim}' needs " in str(error) and "pip install" in str(error)
    assert found == is_available


def missing_optimizer() -> str:
    for optim in ("adamw_anyprecision", "galore_adamw"):
        try:
            check_optimizer_package(optim)
        except ImportError:
            return optim
    pytest.skip(f"all packages of {list(PACKAGES)} are installed")


def test_missing_optimizer_package_is_reported_at_construction(tmp_path) -> None:
    optim = missing_optimizer()
    with pytest.raises(ImportError, match=f"optim='{optim}' needs the package .* pip install"):
        build_federation(tmp_path, optim=optim)

    class OwnOptimizer(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    build_federation(tmp_path, base=OwnOptimizer, optim=optim).train()
    build_federation(tmp_path, optim=optim, trainer={"optimizers": (lambda m: torch.optim.SGD(m.parameters()), None)})


# ---- The metric of the best model


def test_metric_that_no_evaluation_has_is_reported_at_construction(tmp_path) -> None:
    settings = {"eval_strategy": "epoch", "metric_for_best_model": "accuracy"}
    evaluated = {"eval_dataset": rows(4)}
    with pytest.raises(ValueError, match="'accuracy', but without `compute_metrics` .* loss, runtime.*Pass"):
        build_federation(tmp_path, trainer=evaluated, **settings)
    with pytest.raises(ValueError, match="metrics a_loss, a_runtime"):
        build_federation(
            tmp_path, trainer={"eval_dataset": {"a": rows(4)}}, **{**settings, "metric_for_best_model": "b"}
        )

    class AddsMetric(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_accuracy"] = 1.0

    class LogsMetric(Trainer):
        def log(self, logs, *args, **kwargs):
            logs["eval_accuracy"] = 1.0
            super().log(logs, *args, **kwargs)

    build_federation(tmp_path, trainer={**evaluated, "callbacks": [AddsMetric()]}, **settings).train()
    build_federation(tmp_path, base=LogsMetric, trainer=evaluated, **settings).train()
    build_federation(tmp_path, trainer=evaluated, **{**settings, "metric_for_best_model": "eval_loss"}).train()
    build_federation(tmp_path, trainer=evaluated, **{**settings, "metric_for_best_model": "runtime"}).train()


# ---- Columns


def test_columns_that_the_model_does_not_read_are_reported_at_construction(tmp_path) -> None:
    raw = {name: Dataset.from_dict({"text": ["a", "b"], "label_": [0, 1]}) for name in ("north", "south")}

    def collate(features):
        return {
            "input_ids": torch.ones(len(features), 4, dtype=torch.long),
            "labels": torch.zeros(len(features)).long(),
        }

    with pytest.raises(ValueError, match="columns text, label_, of which .* reads none.*remove_unused_columns=False"):
        build_federation(tmp_path, raw, trainer={"data_collator": collate})
    build_federation(tmp_path, raw, trainer={"data_collator": collate}, remove_unused_columns=False).train()


def test_column_that_the_task_reads_is_checked_at_construction(tmp_path) -> None:
    raw = {name: Dataset.from_dict({"text": ["a b", "b"], "label": [0, 1]}) for name in ("north", "south")}
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    given = {"processing_class": tokenizer, "task": TextClassification(["bad", "good"], text_column="txt")}
    with pytest.raises(ValueError, match="columns text, label, but TextClassification reads the column 'txt'. Set"):
        build_federation(tmp_path, raw, trainer=given)
    build_federation(tmp_path, raw, trainer={**given, "task": TextClassification(["bad", "good"])}).train()


def test_column_that_a_collator_misses_is_explained_with_remove_unused_columns(tmp_path) -> None:
    weighted = {name: data.add_column("weight", [1.0] * len(data)) for name, data in CLIENTS.items()}

    def collate(features):
        assert all(feature["weight"] for feature in features)
        names = ("input_ids", "labels")
        return {name: torch.tensor([feature[name] for feature in features]) for name in names}

    trainer = build_federation(tmp_path, weighted, trainer={"data_collator": collate})
    with pytest.raises(RoundFailedError) as error:
        trainer.train()
    assert "KeyError: 'weight'. The trainer removed the columns weight, " in str(error.value.__cause__)
    assert "set remove_unused_columns=False" in str(error.value.__cause__)
    build_federation(tmp_path, weighted, trainer={"data_collator": collate}, remove_unused_columns=False).train()


def test_argument_that_a_model_misses_is_explained_with_the_removed_columns(tmp_path) -> None:
    renamed = {name: data.rename_column("input_ids", "tokens") for name, data in CLIENTS.items()}
    with pytest.raises(RoundFailedError) as error:
        build_federation(tmp_path, renamed).train()
    assert "removed the columns tokens" in str(error.value.__cause__)
    assert "rename the column to the argument of the model" in str(error.value.__cause__)


def test_other_errors_of_a_collator_keep_their_text(tmp_path) -> None:
    weighted = {name: data.add_column("weight", [1.0] * len(data)) for name, data in CLIENTS.items()}

    def collate(features):
        raise KeyError("another name")

    with pytest.raises(RoundFailedError) as error:
        build_federation(tmp_path, weighted, trainer={"data_collator": collate}).train()
    assert isinstance(error.value.__cause__, KeyError) and "removed" not in str(error.value.__cause__)


# ---- The output folder


def test_output_folder_that_is_a_file_is_reported_at_construction(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file is a file. Choose another output folder"):
        build_federation(tmp_path / "file")
    with pytest.raises(StorageError, match="run cannot be created, because .*file is a file"):
        build_federation(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("settings", "num_rounds"),
    [
        ({"save_strategy": "epoch"}, 3),
        ({"save_strategy": "steps"}, 3),
        ({"save_strategy": "steps", "save_steps": 2}, 5),
        ({"save_strategy": "steps", "save_steps": 9}, 3),
        ({"save_strategy": "steps", "save_steps": 0.5}, 4),
    ],
)
def test_number_of_checkpoints_is_that_of_the_run(tmp_path, settings, num_rounds) -> None:
    trainer = build_federation(tmp_path / "run", num_rounds=num_rounds, **settings)
    trainer.train()
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == num_checkpoints(trainer.args, num_rounds)


@pytest.fixture
def set_free_space(monkeypatch) -> Callable[[int], None]:
    """Call `set_free_space(number)` to set the free bytes of all disks."""
    usage = shutil.disk_usage(".")
    return lambda free: monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))


def test_disk_without_space_for_the_checkpoints_is_reported_with_the_missing_bytes(tmp_path, set_free_space) -> None:
    free = 10**11
    set_free_space(free)
    assert check_free_space(tmp_path / "new" / "run", 1000, 3) is None
    with pytest.raises(StorageError, match=r"run has .* free disk space, but a checkpoint .*GB are missing.*--resume"):
        check_free_space(tmp_path / "run", 2 * free + 10**10, 1)
    warning = check_free_space(tmp_path, free // 2, 3, limit=2)
    assert "3 of them need" in warning and "save_total_limit=2, and the next checkpoint is written before" in warning
    assert "set a smaller `save_total_limit`" in warning
    assert "smaller" not in check_free_space(tmp_path, free // 2, 3, limit=1)
    assert "(there is no `save_total_limit`)" in check_free_space(tmp_path, free // 2, 3)
    assert check_free_space(tmp_path, free // 2, 3, existing=free) is None


def test_run_without_space_for_a_checkpoint_ends_before_the_first_round(tmp_path, set_free_space) -> None:
    set_free_space(10)
    seen: list[int] = []

    class Watches(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            seen.append(1)

    trainer = build_federation(tmp_path, trainer={"callbacks": [Watches()]}, save_strategy="epoch")
    with pytest.raises(StorageError, match="10 bytes of free disk space"):
        trainer.train()
    assert not seen
    build_federation(tmp_path, save_strategy="no").train()


def test_plain_trainer_without_a_federation_is_not_checked(tmp_path, caplog) -> None:
    args = arguments(tmp_path, logging_strategy="steps", logging_steps=50)
    FederatedTrainer(tiny_model(), args, train_dataset=rows(4)).train()
    assert "count" not in caplog.text
