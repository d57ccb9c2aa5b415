"""
`hf-federated audit`: measure what a client reveals by the data that it sends.

With a recipe, the command attacks the payloads of the recipe's clients: parameters, adapters or predictions. With a
model and a dataset, it attacks the hidden states and embedding gradients of a split model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Value
from peft import PeftConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers import PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from hf_federated.audits import AuditConfig, Inversion, audit_leakage, plot_leakage
from hf_federated.cards.leakage import add_leakage, embedding_text, inversion_table, leakage_report, targets_text
from hf_federated.cards.payload_leakage import add_payload_audit, payload_report, payload_table
from hf_federated.cards.tables import plural
from hf_federated.cli.dataclass_options import add_dataclass_options, build_from_options
from hf_federated.cli.partition import load_splits
from hf_federated.cli.recipe_options import add_output_dir, add_set_option, make_current_folder_importable
from hf_federated.data import DatasetSource
from hf_federated.experiments.audit.recipe_audit import audit_recipe, public_name
from hf_federated.experiments.data.files import hub_errors
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.recipe.fields import check_names
from hf_federated.experiments.recipe.recipe import parse_recipe
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.utils.optional_packages import require_packages
from hf_federated.utils.remote_code import load_causal_model, load_repository_tokenizer
from hf_federated.utils.storage import check_folder


# Suffixes of the file names of recipes.
RECIPE_SUFFIXES = (".yaml", ".yml")


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument(
        "model",
        metavar="RECIPE|MODEL",
        help="a recipe (a YAML file), to attack what its clients send; or, for a split model, a decoder model or an"
        " adapter: a folder or Hub id",
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="?",
        help="for a split model, a dataset: a Hub id, a folder, or a CSV, JSON or Parquet file",
    )
    add_set_option(parser)
    parser.add_argument("--text-column", default="text", help="the column of the texts (default: %(default)s)")
    parser.add_argument("--name", metavar="CONFIG", help="configuration of the dataset")
    parser.add_argument("--split", help="the split to use (default: train, or else the first split)")
    parser.add_argument("--revision", help="branch, tag or commit of a dataset on the Hub")
    parser.add_argument("--model-revision", help="branch, tag or commit of a model on the Hub")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code in the repository of the model and the tokenizer, which ChatGLM needs",
    )
    parser.add_argument(
        "--victim-model",
        metavar="MODEL",
        help="the model whose head the victims use, if it differs from MODEL, such as a model with a trained adapter",
    )
    add_output_dir(parser, "folder for audit.json and report.md, and for audit.png of a split model")
    parser.add_argument(
        "--card", metavar="FILE", help="a model card (README.md) to which a section with the results is added"
    )
    add_dataclass_options(parser, AuditConfig)


def audit(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the model, the data or an option cannot be used.
    """
    _check_output(arguments)
    if Path(arguments.model).suffix in RECIPE_SUFFIXES:
        _audit_recipe(arguments)
        return
    if arguments.data is None:
        raise CommandError(
            f"audit: {arguments.model} is not a recipe (.yaml), so DATA is missing. Add a dataset to audit a split"
            " model, or name a recipe to audit its clients."
        )
    if arguments.overrides:
        raise CommandError("--set changes fields of a recipe. Remove it, or name a recipe in place of MODEL and DATA.")
    with command_errors("audit"):
        # Check all packages now, because the report is written after attacks that take minutes.
        extras = {"metrics": {"rouge_score": "rouge-score"}, "plots": {"matplotlib": "matplotlib"}}
        require_packages("the command", extras)
        config: AuditConfig = build_from_options(AuditConfig, arguments)
    _check_device(config.device)
    texts = load_texts(arguments)
    with command_errors(arguments.model), hub_errors("MODEL", arguments.model):
        code = {"trust_remote_code": True} if arguments.trust_remote_code else {}
        tokenizer = load_repository_tokenizer(arguments.model, revision=arguments.model_revision, **code)
        model = _load_model(arguments.model, arguments.model_revision, code)
    victim_model = None
    if arguments.victim_model is not None:
        with command_errors(f"--victim-model {arguments.victim_model}"):
            victim_model = _load_model(arguments.victim_model, None, code)
    with command_errors(arguments.model):
        order = np.random.default_rng(config.seed).permutation(len(texts))
        shuffled = [texts[number] for number in order]
        attacker_texts = shuffled[: config.num_attacker_rows]
        victim_texts = shuffled[config.num_attacker_rows :]
        names = {
            "model_name": public_name(arguments.model),
            "data_name": _public_data_name(arguments.data),
            "versions": _versions(),
        }
        result = audit_leakage(
            model, tokenizer, attacker_texts, victim_texts, config, victim_model, _print_inversion, **names
        )
    print(f"\n{inversion_table(result.inversions)}\n\n{targets_text(result)}\n\n{embedding_text(result)}\n")
    _write_results(arguments, result, leakage_report(result, "audit.png"), add_leakage)
    with command_errors(f"--output-dir {arguments.output_dir}"):
        plot_leakage(result, Path(arguments.output_dir, "audit.png"))
    print(f"Wrote audit.json, report.md and audit.png to {arguments.output_dir}.")


def _check_output(arguments: argparse.Namespace) -> None:
    if arguments.card is not None and not Path(arguments.card).is_file():
        raise CommandError(f"--card: the file {arguments.card} does not exist.")
    check_folder(arguments.output_dir)


def _audit_recipe(arguments: argparse.Namespace) -> None:
    """Attack the payloads of a recipe's clients. A recipe without the section `audit` is audited as configured."""
    if arguments.data is not None:
        raise CommandError(f"audit: a recipe names its data. Remove {arguments.data}.")
    if arguments.trust_remote_code:
        raise CommandError(
            "--trust-remote-code is for MODEL and DATA. Set model.kwargs={trust_remote_code: true} in the recipe."
        )
    values = read_values(arguments.model, arguments.overrides)
    values["audit"] = values.get("audit") or {}
    check_names(values)
    make_current_folder_importable()
    audit = audit_recipe(parse_recipe(values), lambda line: print(line, flush=True))
    print(f"\n{payload_table(audit)}\n")
    _write_results(arguments, audit, payload_report(audit), add_payload_audit)
    print(f"Wrote audit.json and report.md to {arguments.output_dir}.")


def _write_results(arguments: argparse.Namespace, audit: Any, report: str, add_section: Callable[..., str]) -> None:
    """Write the results and the report to the output folder, and add a section to the model card."""
    with command_errors(f"--output-dir {arguments.output_dir}"):
        folder = Path(arguments.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        audit.save(folder / "audit.json")
        (folder / "report.md").write_text(report, encoding="utf-8")
    if arguments.card is not None:
        card = Path(arguments.card)
        card.write_text(add_section(card.read_text(encoding="utf-8"), audit), encoding="utf-8")


def load_texts(arguments: argparse.Namespace) -> list[str]:
    """
    Load the texts of a dataset, without empty texts.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the column does not exist, is not of type string, or has only empty texts.
    """
    splits: Mapping[str, Any] = load_splits(arguments.data, arguments.name, arguments.split, arguments.revision)
    rows = splits["train"] if "train" in splits else next(iter(splits.values()))
    with command_errors(arguments.data):
        table: Dataset = rows.load() if isinstance(rows, DatasetSource) else rows
    feature = table.features.get(arguments.text_column)
    if not isinstance(feature, Value) or feature.dtype not in ("string", "large_string"):
        texts = [name for name, kind in table.features.items() if isinstance(kind, Value) and "string" in kind.dtype]
        raise CommandError(
            f"--text-column {arguments.text_column}: {arguments.data} has no text column with this name. Its text"
            f" columns are: {', '.join(texts) or 'none'}."
        )
    non_empty = [text for text in table[arguments.text_column] if text and text.strip()]
    if not non_empty:
        raise CommandError(f"--text-column {arguments.text_column}: all texts of {arguments.data} are empty.")
    return non_empty


def _print_inversion(inversion: Inversion) -> None:
    """Print the result of one attack immediately, because training a decoder takes minutes."""
    setting = f"{plural(inversion.head_blocks, 'block')} before the cut, {inversion.wire_dtype}, {inversion.attacker}"
    print(f"{setting}: {100 * inversion.token_recall:.1f} % of the tokens", flush=True)


def _load_model(name: str, revision: str | None, code: dict[str, Any]) -> PreTrainedModel:
    """Load a model, or the base model of an adapter with the adapter merged. `code` permits code of the repository."""
    # The model is in float32, because the audit measures the effect of lower precision with `wire_dtypes`.
    options = {"dtype": torch.float32, "use_safetensors": True, **code}
    if find_adapter_config_file(name, revision=revision) is None:
        return load_causal_model(name, revision=revision, **options)
    # Require the safetensors file, because PEFT would unpickle an adapter without it.
    cached_file(name, SAFETENSORS_WEIGHTS_NAME, revision=revision)
    config = PeftConfig.from_pretrained(name, revision=revision)
    if config.is_prompt_learning:
        raise ValueError(
            f"{name} is an adapter with prefixes, which are not part of the attacked hidden states. Audit the model"
            " without the prefixes."
        )
    base: Any = load_causal_model(config.base_model_name_or_path, revision=config.revision, **options)
    return PeftModel.from_pretrained(base, name, revision=revision).merge_and_unload()


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {device}: {' '.join(str(error).split())[:200]}") from error


def _public_data_name(name: str) -> str:
    """Like `public_name`, but a file name includes its folder, because many files are named `train`."""
    path = Path(name)
    return f"{path.resolve().parent.name}/{path.name}" if path.is_file() else public_name(name)


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
