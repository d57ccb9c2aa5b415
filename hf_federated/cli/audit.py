"""`hf-federated audit`: what hidden states and embedding gradients of a split model's client tell of its text."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Value
from peft import PeftConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from hf_federated.audits import AuditConfig, Inversion, audit_leakage, plot_leakage
from hf_federated.cards.leakage import add_leakage, embedding_text, inversion_table, leakage_report, targets_text
from hf_federated.cards.tables import plural
from hf_federated.cli.dataclass_options import add_dataclass_options, build_from_options
from hf_federated.cli.partition import load_splits
from hf_federated.data import DatasetSource
from hf_federated.data.plots.figures import require_matplotlib
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.tasks.metrics.base import require_extra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", metavar="MODEL", help="a decoder model or an adapter: a folder, or its id on the Hub")
    parser.add_argument("data", metavar="DATA", help="a data set of the Hub, a folder, or a CSV, JSON or Parquet file")
    parser.add_argument("--text-column", default="text", help="the column with the texts (default: %(default)s)")
    parser.add_argument("--name", metavar="CONFIG", help="the data set's configuration")
    parser.add_argument("--split", help="the split to take rows from (default: train, or the first)")
    parser.add_argument("--revision", help="a branch, tag or commit of a data set of the Hub")
    parser.add_argument("--model-revision", help="a branch, tag or commit of a model of the Hub")
    parser.add_argument(
        "--victim-model",
        metavar="MODEL",
        help="whose head the victims have, if it is another, as one with a trained adapter",
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="where audit.json, report.md and audit.png go")
    parser.add_argument("--card", metavar="FILE", help="a model card, README.md, that gets a section with the result")
    add_dataclass_options(parser, AuditConfig)


def audit(arguments: argparse.Namespace) -> None:
    """
    Carries the command out.

    Raises:
        CommandError: If the model, the data or an option cannot be used.
    """
    with command_errors("audit"):
        require_matplotlib()
        require_extra("rouge_score", "rouge-score", "audit")
        config: AuditConfig = build_from_options(AuditConfig, arguments)
    _check_device(config.device)
    if arguments.card is not None and not Path(arguments.card).is_file():
        raise CommandError(f"--card: there is no file {arguments.card}.")
    if Path(arguments.output).exists() and not Path(arguments.output).is_dir():
        raise CommandError(f"--output: {arguments.output} is a file, and no folder.")
    texts = load_texts(arguments)
    with command_errors(arguments.model):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, revision=arguments.model_revision)
        model = _load_model(arguments.model, arguments.model_revision)
    victim_model = None
    if arguments.victim_model is not None:
        with command_errors(f"--victim-model {arguments.victim_model}"):
            victim_model = _load_model(arguments.victim_model, None)
    with command_errors(arguments.model):
        order = np.random.default_rng(config.seed).permutation(len(texts))
        drawn = [texts[number] for number in order]
        own, others = drawn[: config.num_attacker_rows], drawn[config.num_attacker_rows :]
        names = {
            "model_name": _shown(arguments.model),
            "data_name": _shown_data(arguments.data),
            "versions": _versions(),
        }
        found = audit_leakage(model, tokenizer, own, others, config, victim_model, _tell, **names)
    print(f"\n{inversion_table(found.inversions)}\n\n{targets_text(found)}\n\n{embedding_text(found)}\n")
    with command_errors(f"--output {arguments.output}"):
        folder = Path(arguments.output)
        folder.mkdir(parents=True, exist_ok=True)
        found.save(folder / "audit.json")
        plot_leakage(found, folder / "audit.png")
        (folder / "report.md").write_text(leakage_report(found, "audit.png"), encoding="utf-8")
    if arguments.card is not None:
        card = Path(arguments.card)
        card.write_text(add_leakage(card.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(f"Written to {arguments.output}: audit.json, report.md, audit.png.")


def load_texts(arguments: argparse.Namespace) -> list[str]:
    """
    The texts of the rows that a user named, without empty ones.

    Raises:
        CommandError: If there is no such column, or it holds no texts.
    """
    splits: Mapping[str, Any] = load_splits(arguments.data, arguments.name, arguments.split, arguments.revision)
    rows = splits["train"] if "train" in splits else next(iter(splits.values()))
    with command_errors(arguments.data):
        table: Dataset = rows.load() if isinstance(rows, DatasetSource) else rows
    feature = table.features.get(arguments.text_column)
    if not isinstance(feature, Value) or feature.dtype not in ("string", "large_string"):
        texts = [name for name, kind in table.features.items() if isinstance(kind, Value) and "string" in kind.dtype]
        raise CommandError(
            f"--text-column {arguments.text_column}: {arguments.data} has no column of texts of that name; it has"
            f" {', '.join(texts) or 'none at all'}."
        )
    found = [text for text in table[arguments.text_column] if text and text.strip()]
    if not found:
        raise CommandError(f"--text-column {arguments.text_column}: no row of {arguments.data} has a text.")
    return found


def _tell(found: Inversion) -> None:
    """One line as soon as there is something to tell: a decoder takes minutes."""
    where = f"{plural(found.head_blocks, 'block')} before the cut, {found.wire_dtype}, {found.attacker}"
    print(f"{where}: {100 * found.token_recall:.1f} % of the tokens", flush=True)


def _load_model(name: str, revision: str | None) -> PreTrainedModel:
    """A model, or that of an adapter with the adapter merged."""
    # In float32: what halves of the precision hide from an attacker is the wire's to say.
    as_read = {"dtype": torch.float32, "use_safetensors": True}
    if find_adapter_config_file(name, revision=revision) is None:
        return AutoModelForCausalLM.from_pretrained(name, revision=revision, **as_read)
    # PEFT would unpickle an adapter that has no such file.
    cached_file(name, SAFETENSORS_WEIGHTS_NAME, revision=revision)
    config = PeftConfig.from_pretrained(name, revision=revision)
    if config.is_prompt_learning:
        raise ValueError("Prefixes are not part of the hidden states that are attacked: give the model without them.")
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, revision=config.revision, **as_read)
    return PeftModel.from_pretrained(base, name, revision=revision).merge_and_unload()


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {device}: {' '.join(str(error).split())[:200]}") from error


def _shown(name: str) -> str:
    """A Hub id as it is; of a path of this machine its last part."""
    return Path(name).name if Path(name).exists() else name


def _shown_data(name: str) -> str:
    """As `_shown`; of a file with the folder that it is in, for many are called `train`."""
    path = Path(name)
    return f"{path.resolve().parent.name}/{path.name}" if path.is_file() else _shown(name)


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
