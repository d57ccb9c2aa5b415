"""Private names of other libraries that hf_federated uses.

The table [`PRIVATE_NAMES`] lists each private name that the package uses. `tests/test_compat.py` checks that every
name exists in the installed versions and that no other module uses a private name that the table lacks. Code that
depends on the version of a library also belongs in this module. For example, transformers 5.23 renamed gradient
checkpointing to activation checkpointing.

- A name that can be wrapped has a function or a constant in this module. Other modules call the wrapper only.
- A method that a subclass overrides, or an attribute that is set in place, stays where it is used. The `use` column
  of the table names the folder.

`CHECKED_VERSIONS` holds the versions of the last check; they are the versions of `constraints.txt`.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import Version


# Functions import the libraries, because `data/` uses this module without torch and transformers.
if TYPE_CHECKING:
    import numpy as np
    import torch.distributed as dist
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from datasets.table import Table
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import (
        GenerationConfig,
        PretrainedConfig,
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )


CHECKED_VERSIONS = {
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "evaluate": "0.4.6",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
}


@dataclass(frozen=True)
class PrivateName:
    """
    A private name of another library.

    Args:
        path (`str`): Dotted path of the name: the class or module that has it, and the name.
        use (`str`): The wrapper in this module, or `"overrides"`, `"sets"`, `"reads"`, `"calls"` or `"names"` and the
            folders of the package that do so.
        why (`str`): Why the package uses the name and no public interface.
        without (`str`): What breaks when a new version removes the name or changes its meaning.
        removed (`str`, *optional*): First version without the name. The wrapper works without it.
    """

    path: str
    use: str
    why: str
    without: str
    removed: str | None = None

    @property
    def owner(self) -> str:
        """Dotted path of the class or module that has the name."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The name."""
        return self.path.rpartition(".")[2]

    @property
    def checked(self) -> str:
        """Version of the library that the name was last checked on."""
        return CHECKED_VERSIONS[self.path.partition(".")[0]]


PRIVATE_NAMES = (
    # ---- transformers: methods of Trainer that a federated or split trainer overrides
    PrivateName(
        "transformers.Trainer._save_checkpoint",
        "overrides: trainer, split_training",
        "A checkpoint includes the state of the clients and appears in one rename.",
        "Checkpoints lack the state of the clients; a run cannot resume.",
    ),
    PrivateName(
        "transformers.Trainer._save",
        "overrides: trainer",
        "The whole tensors of a model that FSDP has sharded are not tied.",
        "With FSDP, files of models contain tied weights twice.",
    ),
    *(
        PrivateName(
            f"transformers.Trainer.{name}",
            "overrides: trainer",
            "With FSDP, a checkpoint has the state of the federation in place of a second copy of the model.",
            "`save_strategy` and `resume_from_checkpoint` fail with FSDP.",
        )
        for name in ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")
    ),
    PrivateName(
        "transformers.Trainer._load_from_checkpoint",
        "overrides: trainer, split_training",
        "Adapters are loaded from the state of the server or of the parties.",
        "A resume with an adapter fails or loads the adapter twice.",
    ),
    PrivateName(
        "transformers.Trainer._load_best_model",
        "overrides: trainer, split_training",
        "The best adapter is loaded from the state of the server or of the parties.",
        "`load_best_model_at_end=True` fails or keeps the last adapter.",
    ),
    PrivateName(
        "transformers.Trainer._maybe_log_save_evaluate",
        "overrides: trainer",
        "All processes act on the decisions (log, save, evaluate, stop) of any process at the end of a round.",
        "Processes with `parallelism='clients'` can wait for each other until `ddp_timeout`.",
    ),
    PrivateName(
        "transformers.Trainer._remove_unused_columns",
        "overrides: trainer; wrapper: remove_unused_columns",
        "Public examples are encoded as `Trainer` encodes them; the override skips a copy that removes no column.",
        "Distillation receives columns that the model does not take; client starts are slower.",
    ),
    PrivateName(
        "transformers.Trainer._set_signature_columns_if_needed",
        "overrides: split_training; wrapper: set_signature_columns",
        "The columns are computed once for all clients; a split model takes the columns of the full model.",
        "Columns of a split model are dropped without an error.",
    ),
    PrivateName(
        "transformers.Trainer._signature_columns",
        "sets: split_training; reads: trainer",
        "`_set_signature_columns_if_needed` stores its result there.",
        "As for `_set_signature_columns_if_needed`.",
    ),
    PrivateName(
        "transformers.Trainer._track_num_input_tokens",
        "calls: split_training, clients",
        "The batches of all clients of a step count as input tokens, and the batches of the lean loop.",
        "`num_input_tokens_seen` of a split run, and of a client, is wrong.",
    ),
    PrivateName(
        "transformers.Trainer._initial_num_input_tokens_seen",
        "sets: clients",
        "`Trainer.log` leaves these tokens out of the tokens per second, also in the lean loop.",
        "The tokens per second of clients are wrong.",
    ),
    PrivateName(
        "transformers.Trainer._get_train_sampler",
        "names: split_training",
        "A trainer that overrides the method draws examples in its own way, which a split run does not support.",
        "Such a trainer is accepted, and its sampler has no effect.",
    ),
    PrivateName(
        "transformers.Trainer._created_lr_scheduler",
        "sets: clients",
        "A client's trainer is a copy and builds its own learning rate schedule.",
        "Clients continue the schedule of an earlier client.",
    ),
    PrivateName(
        "transformers.Trainer._memory_tracker",
        "sets: clients",
        "The copy of a trainer must not change the memory metrics of the original.",
        "`skip_memory_metrics=False` reports values of a client, or raises an error.",
    ),
    # ---- transformers: wrapped
    PrivateName(
        "transformers.Trainer._push_from_checkpoint",
        "wrapper: push_from_checkpoint",
        "A checkpoint is pushed after its rename.",
        "`hub_strategy='checkpoint'` and `'every_save'` push nothing.",
    ),
    PrivateName(
        "transformers.Trainer._get_num_items_in_batch",
        "wrapper: num_items_in_batch",
        "The loss of an algorithm is weighted by the share of a batch in a step, as `Trainer` weights its loss.",
        "Losses of algorithms are wrong with gradient accumulation.",
    ),
    PrivateName(
        "transformers.Trainer._prepare_inputs",
        "wrapper: prepare_inputs",
        "Batches outside `Trainer.train` are moved to the device as `Trainer` moves them.",
        "Distillation and the losses of epochs fail on a GPU.",
    ),
    PrivateName(
        "transformers.GenerationMixin._prepare_generation_config",
        "wrapper: prepare_generation_config",
        "The generation mode is known only after all sources of settings are merged.",
        "`SplitModel.generate` cannot refuse modes that it does not support.",
    ),
    PrivateName(
        "transformers.PretrainedConfig._attn_implementation",
        "wrapper: attention_implementation",
        "There is no public name for the attention implementation in use.",
        "MutualKD with `match_attention` does not recognize models that return no attention maps.",
    ),
    PrivateName(
        "transformers.PretrainedConfig._commit_hash",
        "wrapper: commit_hash",
        "transformers stores the commit of a model from the Hub there; there is no public name.",
        "Model cards lack the revision of the base model.",
        removed="5.18.0",
    ),
    PrivateName(
        "transformers.PreTrainedModel._loss_function",
        "constant: LOSS_FUNCTION",
        "The setter of the public property `loss_function` stores a model's own loss there.",
        "A split model computes the default loss in place of the model's own loss.",
    ),
    PrivateName(
        "transformers.PreTrainedTokenizerBase._pad",
        "wrapper: pads_as_transformers",
        "A tokenizer that overrides it pads other columns, or with other values.",
        "Batches of such a tokenizer are wrong.",
    ),
    # ---- transformers: class attributes that a subclass sets
    *(
        PrivateName(
            f"transformers.PreTrainedModel.{name}",
            "sets: split",
            "A split model supports every attention implementation of its parts.",
            f"A split model is refused with {setting}.",
        )
        for name, setting in {
            "_supports_sdpa": "`attn_implementation='sdpa'`",
            "_supports_flash_attn": "`attn_implementation='flash_attention_2'`",
            "_supports_flex_attn": "`attn_implementation='flex_attention'`",
            "_supports_attention_backend": "attention functions that a user registered",
        }.items()
    ),
    # ---- TRL: methods that prepare data in the constructor of a trainer
    PrivateName(
        "trl.SFTTrainer._prepare_dataset",
        "overrides: trainer",
        "The preparation of one client's examples is recorded and repeated for each other client.",
        "`federate(SFTTrainer)` and `federate(DPOTrainer)` refuse their data.",
    ),
    PrivateName(
        "trl.DPOTrainer._precompute_ref_logps",
        "overrides: trainer",
        "As for `_prepare_dataset`, for the log probabilities of the reference model.",
        "`precompute_ref_log_probs=True` of DPO is refused.",
    ),
    PrivateName(
        "trl.SFTTrainer._total_train_tokens",
        "wrapper: train_tokens, set_train_tokens",
        "TRL counts the tokens of a run in the trainer. Clients train in copies of the trainer, which count alone.",
        "`num_tokens` and `eval_num_tokens` in the logs of `federate(SFTTrainer)` and `federate(DPOTrainer)` are 0.",
    ),
    *(
        PrivateName(
            f"trl.GRPOTrainer.{name}",
            "wrapper: drop_generations",
            "The trainer of a client keeps its completions until the memory is collected.",
            "Clients of GRPO need more memory.",
        )
        for name in ("_step", "_buffered_inputs")
    ),
    # ---- accelerate: wrapped
    *(
        PrivateName(
            f"accelerate.Accelerator.{name}",
            "wrapper: prepared_objects, set_prepared_objects",
            "A nested training prepares its own objects; the lists of the outer training are restored afterwards.",
            "Memory grows with each client, and checkpoints save objects of clients.",
        )
        for name in ("_models", "_optimizers", "_schedulers", "_dataloaders")
    ),
    PrivateName(
        "torch.nn.Module._is_accelerate_prepared",
        "wrapper: is_prepared",
        "A lean training leaves the preparation of a model to the first training with `Trainer`.",
        "All clients train with the loop of `Trainer`; simulations of small clients are slower.",
    ),
    *(
        PrivateName(
            f"accelerate.state.{owner}._shared_state",
            "wrapper: process_states",
            "A client of `parallelism='clients'` trains as if its process were the only one.",
            "`parallelism='clients'` wraps models in DDP and deadlocks.",
        )
        for owner in ("PartialState", "AcceleratorState")
    ),
    # ---- datasets: wrapped
    PrivateName(
        "datasets.Dataset._fingerprint",
        "wrapper: dataset_fingerprint",
        "Caches, cards and the comparison of processes identify examples by the fingerprint.",
        "Caches are not found again; cards lack fingerprints; processes cannot compare their data.",
    ),
    PrivateName(
        "datasets.IterableDataset._ex_iterable",
        "wrapper: has_exact_state",
        "The content of a shuffle buffer is not in the state of a stream, so the stream cannot resume from it.",
        "A client with a shuffled stream misses the examples of the buffer after each round.",
    ),
    PrivateName(
        "datasets.Dataset._indices",
        "wrapper: indices_table, view_of_rows",
        "The public reader of a selected column takes seconds for a million rows.",
        "Partitioners read the wrong rows after `select`, `shuffle` or `filter`.",
    ),
    *(
        PrivateName(
            f"datasets.Dataset.{name}",
            "wrapper: view_of_rows",
            "`select` takes longer than the training of a small client, whose examples are opened in each round.",
            "The examples of clients cannot be opened.",
        )
        for name in ("_data", "_indexes", "_info")
    ),
    # ---- evaluate: methods that metrics override
    *(
        PrivateName(
            f"evaluate.Metric.{name}",
            "overrides: tasks",
            "The documented way to define a metric.",
            f"No metric can be {use}.",
        )
        for name, use in {"_info": "created", "_compute": "computed"}.items()
    ),
    PrivateName(
        "evaluate.Metric._build_data_dir",
        "overrides: tasks",
        "The parent class creates a directory in the user's cache even if it writes no file.",
        "Metrics create empty directories.",
    ),
    PrivateName(
        "evaluate.Metric._infer_feature_from_batch",
        "overrides: tasks",
        "The parent class reads the first row of an empty batch.",
        "Metrics with several input formats fail on empty batches.",
    ),
    PrivateName(
        "evaluate.Metric._finalize",
        "overrides: tasks",
        "The parent class raises an obscure error without inputs.",
        "`compute` without inputs raises an obscure error.",
    ),
    PrivateName(
        "evaluate.Metric._feature_names",
        "calls: tasks",
        "The error about missing inputs names the inputs.",
        "The error about missing inputs fails.",
    ),
    PrivateName(
        "transformers.PreTrainedTokenizer._add_tokens",
        "wrapper: older_repository_code",
        "Tokenizers of model repositories (ChatGLM-6B) load their vocabulary after the constructor of the base class.",
        "These tokenizers cannot be loaded.",
    ),
    # ---- torch: wrapped
    PrivateName(
        "torch.distributed.distributed_c10d._get_default_store",
        "wrapper: default_store",
        "Processes report failures through the store of the process group; another store needs another open port.",
        "Launches with several processes fail at the start.",
    ),
    *(
        PrivateName(
            f"torch.nn.Module.{name}",
            "wrapper: module_hooks",
            "There is no public list of the hooks of a module.",
            "Hooks of a full model are ignored in a split without a warning.",
        )
        for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    ),
    PrivateName(
        "torch.nn.Module._modules",
        "wrapper: has_module, trained_layout",
        "`named_children` omits a module that occurs twice, and is slow for a check after each client.",
        "Split parts keep modules of other parts.",
    ),
    PrivateName(
        "torch.nn.Module._parameters",
        "wrapper: trained_layout",
        "`named_parameters` is slow for a check after each client.",
        "A client that trains other parameters is found after the check of all names only.",
    ),
    PrivateName(
        "torch.nn.Module._register_load_state_dict_pre_hook",
        "wrapper: register_load_state_dict_pre_hook",
        "A split model reads checkpoints with the names of the full model.",
        "A split run cannot resume from its checkpoints.",
    ),
    PrivateName(
        "torch.nn.Module._get_name",
        "overrides: split; calls: split_training",
        "`Trainer` finds out by the name of a model whether a smoothed loss shifts the labels.",
        "`label_smoothing_factor` of a split run uses the wrong labels.",
    ),
    PrivateName(
        "torch.optim.lr_scheduler.LRScheduler._last_lr",
        "wrapper: set_last_lr",
        "A restored scheduler reports the learning rate of the last step.",
        "`get_last_lr` of FedOpt's scheduler is wrong after a resume.",
    ),
)


# ---- transformers

# The attribute that holds a model's own loss function, if one was set.
LOSS_FUNCTION = "_loss_function"


# The logger of `Trainer`, and the first words of the records with which it announces a training or an evaluation, in
# all supported versions. A record with new words is shown again.
TRAINER_LOGGER = "transformers.trainer"
BANNER_PREFIXES = (
    "***** Running training *****",
    "  Num examples",
    "  Num Epochs = ",
    "  Num update steps per epoch = ",
    "  Instantaneous batch size per device = ",
    "  Training with DataParallel so batch size has been adjusted to: ",
    "  Total train batch size (w. parallel, distributed & accumulation) = ",
    "  Gradient Accumulation steps = ",
    "  Total optimization steps = ",
    "  Number of trainable parameters = ",
    "  Continuing training from ",
    "  Resuming training from checkpoint with epoch ",
    "  Will skip the first ",
    "  Fast-forwarding the dataloader past ",
    "\n\nTraining completed. Do not forget to share your model on huggingface.co/models",
    "\n***** Running ",
    "  Batch size = ",
)


def set_signature_columns(trainer: Trainer) -> None:
    """Compute the columns that the model of a trainer takes, and store them on the trainer."""
    trainer._set_signature_columns_if_needed()


def remove_unused_columns(trainer: Trainer, dataset: Any, description: str) -> Any:
    """
    Remove the columns that the model of a trainer does not take.

    Args:
        trainer (`transformers.Trainer`): The trainer.
        dataset (`datasets.Dataset`): Encoded examples.
        description (`str`): Name of the dataset in the log.
    """
    return trainer._remove_unused_columns(dataset, description)


def prepare_inputs(trainer: Trainer, inputs: Any) -> Any:
    """Move a batch to the device of a trainer."""
    return trainer._prepare_inputs(inputs)


def num_items_in_batch(trainer: Trainer, batches: list[Any], device: Any) -> Any:
    """Number of items (tokens with a label) in batches, as the trainer counts them for its loss."""
    return trainer._get_num_items_in_batch(batches, device)


def push_from_checkpoint(trainer: Trainer, directory: str) -> None:
    """Push a finished checkpoint to the Hub as `hub_strategy` defines."""
    trainer._push_from_checkpoint(directory)


def prepare_generation_config(model: Any, generation_config: Any, /, **kwargs: Any) -> tuple[GenerationConfig, Any]:
    """The generation settings of a call of `generate`, and the arguments that are not settings."""
    return model._prepare_generation_config(generation_config, **kwargs)


_TRANSFORMERS = Version(importlib.metadata.version("transformers"))

# Path of the output layer of `GPTNeoXForCausalLM`, which transformers 5.14 renamed.
GPT_NEOX_OUTPUT = "lm_head" if _TRANSFORMERS >= Version("5.14.dev0") else "embed_out"

# transformers 5.23 renamed gradient checkpointing to activation checkpointing.
HAS_ACTIVATION_CHECKPOINTING = _TRANSFORMERS >= Version("5.23.dev0")

# The name of the cache as an argument of models and of `generate`, and in outputs. transformers 5.24 renamed it
# (https://github.com/huggingface/transformers/releases/tag/v5.24.0) and accepts the old name until 5.40. Remove this
# constant and `cache_argument` when the lower bound is 5.24.
CACHE_NAME = "cache" if _TRANSFORMERS >= Version("5.24.dev0") else "past_key_values"


def cache_argument(model: nn.Module) -> str:
    """The argument with which a model takes its cache. Code of a model repository can keep the old name."""
    return "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else CACHE_NAME


def checkpointing_settings(args: TrainingArguments) -> dict[str, Any] | None:
    """The settings of activation checkpointing in training arguments, or `None` if it is off."""
    if HAS_ACTIVATION_CHECKPOINTING:
        return dict(args.activation_checkpointing_kwargs or {}) if args.activation_checkpointing else None
    return dict(args.gradient_checkpointing_kwargs or {}) if args.gradient_checkpointing else None


def enable_activation_checkpointing(
    model: PreTrainedModel,
    activation_checkpointing_kwargs: dict[str, Any] | None = None,
    every_n_layers: int = 1,
    offload: bool = False,
) -> None:
    """
    Call `PreTrainedModel.activation_checkpointing_enable`, under its old name with transformers before 5.23.

    Raises:
        ValueError: With transformers before 5.23, if `every_n_layers` or `offload` is set.
    """
    if HAS_ACTIVATION_CHECKPOINTING:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs, every_n_layers, offload)
        return
    if every_n_layers != 1 or offload:
        raise ValueError(
            f"every_n_layers={every_n_layers} and offload={offload} of activation checkpointing need transformers "
            "5.23 or later. Update transformers, or use the defaults every_n_layers=1 and offload=False."
        )
    model.gradient_checkpointing_enable(activation_checkpointing_kwargs)


def disable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Call `PreTrainedModel.activation_checkpointing_disable`, under its old name with transformers before 5.23."""
    if HAS_ACTIVATION_CHECKPOINTING:
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()


class ActivationCheckpointing:
    """With transformers before 5.23, adds the old method names to a model that overrides the new methods."""

    if not HAS_ACTIVATION_CHECKPOINTING:

        def gradient_checkpointing_enable(
            self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
        ) -> None:
            """Call `activation_checkpointing_enable`."""
            # The model class defines the method.
            self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **kwargs)  # type: ignore[attr-defined]

        def gradient_checkpointing_disable(self) -> None:
            """Call `activation_checkpointing_disable`."""
            self.activation_checkpointing_disable()  # type: ignore[attr-defined]  # as above


def attention_implementation(config: PretrainedConfig) -> str | None:
    """The attention implementation that a model uses, such as `"eager"` or `"sdpa"`."""
    return getattr(config, "_attn_implementation", None)


def commit_hash(config: PretrainedConfig) -> str | None:
    """The commit of the Hub repository that a config was loaded from; `None` with transformers 5.18 or later."""
    return vars(config).get("_commit_hash")


@contextmanager
def older_repository_code() -> Iterator[None]:
    """
    Load tokenizers and models with code of their repository that was written for transformers 4.33 or older.

    - Since transformers 4.34, the constructor of `PreTrainedTokenizer` reads the vocabulary, in order to register the
      special tokens. Tokenizers that load their vocabulary after this constructor (ChatGLM-6B) fail
      ([transformers#26777](https://github.com/huggingface/transformers/issues/26777)). In this context, their special
      tokens are registered at the end.
    - Since transformers 5, a model has `all_tied_weights_keys` after `post_init`, which the constructor of ChatGLM-6B
      does not call. In this context, the attribute is computed when it is read.

    Remove the context when no supported model needs it.
    """
    from transformers import PreTrainedModel, PreTrainedTokenizer

    add_tokens = PreTrainedTokenizer._add_tokens
    postponed: list[tuple[Any, list[Any], bool]] = []

    def add_or_postpone(self: Any, new_tokens: list[Any], special_tokens: bool = False) -> int:
        try:
            self.get_vocab()
        except (AttributeError, TypeError):  # a property of the vocabulary reads an attribute that is not yet set
            postponed.append((self, new_tokens, special_tokens))
            return 0
        return int(add_tokens(self, new_tokens, special_tokens))

    PreTrainedTokenizer._add_tokens = add_or_postpone
    PreTrainedModel.all_tied_weights_keys = _TiedWeights()
    try:
        yield
    finally:
        PreTrainedTokenizer._add_tokens = add_tokens
        del PreTrainedModel.all_tied_weights_keys
    for tokenizer, new_tokens, special_tokens in postponed:
        tokenizer._add_tokens(new_tokens, special_tokens=special_tokens)


class _TiedWeights:
    """Attribute of a class that sets `all_tied_weights_keys` of an instance without this attribute."""

    def __get__(self, model: Any, owner: type) -> Any:
        if model is not None:
            model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
            return model.all_tied_weights_keys
        return self


def pads_as_transformers(tokenizer: Any) -> bool:
    """Whether a tokenizer pads with the methods of transformers. Some tokenizers pad boxes or tags in addition."""
    from transformers import PreTrainedTokenizerBase

    own, base = type(tokenizer), PreTrainedTokenizerBase
    if not isinstance(tokenizer, base) or vars(tokenizer).keys() & {"pad", "_pad"}:
        return False
    return bool(own.pad is base.pad and own._pad is base._pad)


# ---- accelerate


def prepared_objects(accelerator: Accelerator) -> tuple[list[Any], ...]:
    """The lists of models, optimizers, schedulers and data loaders that an accelerator prepared."""
    return accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders


def set_prepared_objects(accelerator: Accelerator, lists: tuple[list[Any], ...]) -> None:
    """Replace the lists that [`prepared_objects`] returns."""
    accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders = lists


def is_prepared(model: nn.Module) -> bool:
    """Whether accelerate has prepared a model: moved it to its device and wrapped its forward pass."""
    return bool(getattr(model, "_is_accelerate_prepared", False))


def isolate_gradient_state(accelerator: Accelerator) -> None:
    """
    Give an accelerator its own state of gradient accumulation.

    All instances of `GradientState` in a process share one state. With accelerators in several threads, an accelerator
    would skip steps of its optimizer while another accelerator accumulates gradients, and would cut its batches to the
    length of the last batch of another accelerator. accelerate separates the states of threads on a TPU only
    (`accelerate.state.ThreadLocalSharedDict`). Remove this function when each `Accelerator` has its own state.
    """
    state = accelerator.gradient_state
    state.__dict__ = {name: copy.copy(value) for name, value in vars(state).items()}

    def with_own_state(prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def prepare_with_own_state(*args: Any, **kwargs: Any) -> Any:
            prepared = prepare(*args, **kwargs)
            prepared.gradient_state = state
            return prepared

        return prepare_with_own_state

    accelerator.prepare_data_loader = with_own_state(accelerator.prepare_data_loader)
    accelerator.prepare_optimizer = with_own_state(accelerator.prepare_optimizer)
    accelerator.prepare_scheduler = with_own_state(accelerator.prepare_scheduler)


def process_states() -> list[dict[str, Any]]:
    """The states that all instances of `PartialState` and `AcceleratorState` share."""
    from accelerate.state import AcceleratorState, PartialState

    return [PartialState._shared_state, AcceleratorState._shared_state]


# ---- datasets


def dataset_fingerprint(dataset: Dataset) -> str:
    """The fingerprint of a dataset, which changes with its examples."""
    return dataset._fingerprint


def indices_table(dataset: Dataset) -> Table | None:
    """A column of the selected row numbers, or `None` if the dataset has all rows of its table in order."""
    return dataset._indices


def view_of_rows(dataset: Dataset, rows: np.ndarray, fingerprint: str) -> Dataset:
    """
    Return the dataset of `Dataset.select` with a fingerprint, in a tenth of the time.

    Args:
        dataset (`datasets.Dataset`): A dataset without search indexes.
        rows (`np.ndarray` of shape `(num_rows,)`, integer): Valid row numbers, at least one.
        fingerprint (`str`): The fingerprint of the view.
    """
    import pyarrow as pa
    from datasets.table import InMemoryTable

    start, num_rows, indices = int(rows[0]), len(rows), dataset._indices
    view = copy.copy(dataset)
    view._info, view._indexes, view._fingerprint = dataset._info.copy(), {}, fingerprint
    if int(rows[-1]) - start != num_rows - 1 or (rows[1:] - rows[:-1] != 1).any():
        numbers = pa.array(rows, type=pa.uint64())
        numbers = numbers if indices is None else indices.column(0).take(numbers)
        view._indices = InMemoryTable(pa.Table.from_arrays([numbers], names=["indices"]))
    elif indices is None:
        view._data = dataset._data.slice(start, num_rows)
    else:
        view._indices = indices.slice(start, num_rows)
    return view


def has_exact_state(dataset: IterableDataset) -> bool:
    """
    Whether a stream continues exactly after the example at which its `state_dict` was read.

    Before datasets 5.2, streams with `map` or `filter` repeat or skip examples. The content of a shuffle buffer is not
    in the `state_dict` in any version.
    """
    if Version(importlib.metadata.version("datasets")).release < (5, 2):
        return False
    pending: list[Any] = [dataset._ex_iterable]
    while pending:
        iterable = pending.pop()
        if type(iterable).__name__ == "BufferShuffledExamplesIterable":
            return False
        for value in vars(iterable).values():
            parts = value if isinstance(value, list) else [value]
            pending += [part for part in parts if type(part).__module__ == type(iterable).__module__]
    return True


# ---- torch


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def module_hooks(module: nn.Module) -> list[Any]:
    """All forward and backward hooks that are registered on a module."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    return [hook for registered in hooks for hook in registered.values()]


def has_module(owner: nn.Module, name: str) -> bool:
    """Whether a module has a submodule with this name that is not `None`."""
    return owner._modules.get(name) is not None


def trained_layout(model: nn.Module) -> list[Any]:
    """
    Describe the modules of a model and its trainable parameters, in less time than `named_parameters` needs.

    If two return values for one model are equal, then `named_parameters` has the same names of trainable parameters.
    """
    layout: list[Any] = []
    pending, seen = [model], {0}
    while pending:
        module = pending.pop()
        layout.append(id(module))
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                layout += (name, id(parameter))
        for name, child in module._modules.items():
            if child is not None:
                layout.append(name)
                pending.append(child)
    return layout


def register_load_state_dict_pre_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call `hook(state_dict, prefix, ...)`, without the module as an argument, before a module loads its state."""
    module._register_load_state_dict_pre_hook(hook)


def set_last_lr(scheduler: LRScheduler, rates: list[Any]) -> None:
    """Set the learning rates that `get_last_lr` returns."""
    scheduler._last_lr = rates


# ---- sentence-transformers and TRL


def reads_all_columns(trainer: Trainer) -> bool:
    """
    Whether a trainer passes all columns of an example to its collator.

    The trainers of sentence-transformers do so with every setting: each column is an input, in the order of the
    columns.
    """
    modules = (cls.__module__.partition(".")[0] for cls in type(trainer).__mro__)
    return not trainer.args.remove_unused_columns or "sentence_transformers" in modules


def follows_steps_of_run(callback: TrainerCallback) -> bool:
    """
    Whether a callback follows a schedule over all steps of the training.

    `SparseEncoderTrainer` increases the weights of the regularizers of `SpladeLoss` over the first third of its steps.
    """
    return any(cls.__name__ == "SpladeRegularizerWeightSchedulerCallback" for cls in type(callback).__mro__)


def check_trl_splits_sft_trainer() -> None:
    """
    Check that TRL computes the loss of `SFTTrainer` from the outputs that a split model has.

    TRL 1.16 replaces the forward pass of the model with a function of the model. Earlier versions replace it with
    other functions, or compute the loss from logits.

    Raises:
        ImportError: If TRL is older than 1.16.
    """
    installed = importlib.metadata.version("trl")
    if Version(installed).release < (1, 16):
        raise ImportError(
            f"A split SFTTrainer needs trl>=1.16, but trl {installed} is installed. Upgrade TRL, which needs Python "
            "3.11 or newer."
        )


# Trainers of TRL that a federation does not support, with the reason.
REFUSED_TRAINERS = {
    "A2POTrainer": "its `train` generates for all examples before the first step. Use GRPOTrainer or RLOOTrainer",
    "AsyncGRPOTrainer": "its vLLM server has one set of weights for all clients. Use GRPOTrainer",
    "AsyncDistillationTrainer": "its vLLM server has one set of weights for all clients. Use DistillationTrainer",
}


def refusal_of_trainer(trainer_class: type) -> str:
    """Why a federation does not support a trainer of TRL, or a subclass of it. Empty for all other trainers."""
    names = [cls.__name__ for cls in trainer_class.__mro__ if cls.__module__.partition(".")[0] == "trl"]
    return next((REFUSED_TRAINERS[name] for name in names if name in REFUSED_TRAINERS), "")


def micro_steps_per_generation(args: TrainingArguments) -> int:
    """Number of micro-batches for which a trainer of TRL uses the same completions; 1 for all other trainers."""
    if (steps := vars(args).get("steps_per_generation")) is None:
        return 1
    return int(steps) * int(vars(args).get("num_iterations", 1))


def completions_per_generation(args: TrainingArguments) -> int | None:
    """Number of completions that one process generates at a time; `None` for trainers that generate none."""
    if (steps := vars(args).get("steps_per_generation")) is None:
        return None
    return int(args.per_device_train_batch_size) * int(steps)


def set_generation_batch_size(args: TrainingArguments) -> None:
    """
    Set the number of completions of all processes that train together.

    The arguments of TRL count the processes of the launch when they are built. With `parallelism="clients"`, a client
    trains in one of them.
    """
    if (own := completions_per_generation(args)) is not None:
        vars(args)["generation_batch_size"] = own * args.world_size


# The attribute of a trainer of TRL that holds completions.
COMPLETIONS = "_buffered_inputs"


def drop_generations(trainer: Trainer) -> None:
    """Release the completions of a trainer of TRL after its training. A new training starts with a new generation."""
    for name in (COMPLETIONS, "_step"):
        vars(trainer).pop(name, None)


def num_repeats(args: TrainingArguments) -> int:
    """How often a trainer reads each example in an epoch. Trainers of TRL repeat a prompt for each completion."""
    if vars(args).get("steps_per_generation") is None:
        return 1
    return int(vars(args).get("num_generations", 1)) * int(vars(args).get("num_iterations", 1))


def train_tokens(trainer: Trainer) -> int | None:
    """Number of training tokens that a trainer of TRL has counted; `None` for trainers that do not count them."""
    return vars(trainer).get("_total_train_tokens")


def set_train_tokens(trainer: Trainer, num_tokens: int) -> None:
    """Replace the number that [`train_tokens`] returns. Trainers that do not count tokens are unchanged."""
    if "_total_train_tokens" in vars(trainer):
        vars(trainer)["_total_train_tokens"] = num_tokens
