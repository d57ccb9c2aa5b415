"""Hashes of the examples and the weights that a run reads. They identify the inputs of a run on any machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers.utils import CONFIG_NAME

from hf_federated.data.source import content_hash
from hf_federated.experiments.benchmark.identity import MODEL_FIELDS, locations, section_at
from hf_federated.experiments.data.raw import RawData, load_raw_data
from hf_federated.experiments.recipe.recipe import parse_recipe
from hf_federated.features.tfidf import VOCABULARY_FILE
from hf_federated.utils.file_hash import sha256_of_unchanged_file


# Files with the weights of a model. The first pattern that a folder has counts.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf", VOCABULARY_FILE)


def hash_inputs(values: Mapping[str, Any]) -> dict[str, Any]:
    """
    Load the examples of a recipe, and hash the examples and the weights that a run of it reads.

    Args:
        values (`Mapping[str, Any]`): The recipe of the run.

    Returns:
        `dict[str, Any]`: The hashes by [`~hf_federated.experiments.benchmark.identity.INPUT_FIELDS`].

    Raises:
        RecipeError: If the recipe is invalid, or its examples cannot be loaded.
    """
    recipe = parse_recipe(dict(values))
    raw = load_raw_data(recipe, recipe.evaluates_clients)  # as in a run, which orders test examples by client
    return {**hash_examples(raw), "weights": hash_weights(values)}


def hash_examples(raw: RawData) -> dict[str, Any]:
    """
    Hash the raw examples of a run by the fields of a record.

    Args:
        raw ([`~hf_federated.experiments.data.raw.RawData`]): The raw examples.
    """
    return {
        "train_rows": content_hash(raw.train.to_dataset()),
        "test_rows": content_hash(raw.test),
        "further_rows": {split: content_hash(rows) for split, rows in raw.further_tests.items()},
        "public_rows": None if raw.public is None else content_hash(raw.public),
        "server_rows": None if raw.server is None else content_hash(raw.server),
    }


def hash_weights(values: Mapping[str, Any]) -> dict[str, str]:
    """
    Hash the files with the weights of each model that a recipe names, by the dotted name of the field.

    A model of another format, whose files are not found, has its name in place of a hash.

    Args:
        values (`Mapping[str, Any]`): The recipe of the run.
    """
    hashes = {}
    for keys, name in locations(values):
        if name in MODEL_FIELDS:
            section = section_at(values, keys)
            field = ".".join(map(str, (*keys, name)))
            hashes[field] = _hash_of_model(str(section[name]), section.get("revision"))
    return hashes


def _hash_of_model(name_or_path: str, revision: str | None) -> str:
    folder = Path(name_or_path)
    if not folder.is_dir():
        config = try_to_load_from_cache(name_or_path, CONFIG_NAME, revision=revision)
        folder = Path(config).parent if isinstance(config, str) else folder
    for pattern in _WEIGHTS:
        digests = [sha256_of_unchanged_file(file) for file in sorted(folder.glob(pattern))]
        if digests:
            return "sha256:" + hashlib.sha256(" ".join(digests).encode()).hexdigest()
    return f"name:{name_or_path}"
