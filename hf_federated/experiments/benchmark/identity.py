"""The identity of a run: its settings, without the locations of its data and models, and hashes of what is read there.

A record of a run can be reported on another machine, where the same data and models have other paths. The digest of a
run therefore leaves out the locations. A record of other locations, or of files that have changed since, takes the
place of a run only if it has the hashes of the examples and the weights that the run would read.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_federated.experiments.errors import command_errors
from hf_federated.experiments.recipe.sections import TFIDF


# Fields of `data` that choose the test examples.
TEST_FIELDS = ("test_path", "test_split", "test_examples", "test_clients")
# Fields that say where data and models are. A recipe for a local copy changes only these fields.
_LOCATIONS = {
    "data": ("path", "name", "revision", "test_path"),
    "public": ("path", "server_path"),
    "model": ("name_or_path", "revision", "decoder_name_or_path"),
    "partition": ("embedder",),
}
# Fields that a local copy does not need, and the field that has a default.
_PARTS_OF_LOCATIONS = ("name", "revision", "embedder")
# The options of AdaFD's weighting "llm" that name a language model.
_WEIGHING_MODELS = ("generate", "score")
# The locations of models, whose weights are hashed.
MODEL_FIELDS = ("name_or_path", "decoder_name_or_path", *_WEIGHING_MODELS)
# The fields of a record with the hashes of what a run has read.
INPUT_FIELDS = ("train_rows", "test_rows", "further_rows", "public_rows", "server_rows", "weights")


def settings_digest(method: str, values: Mapping[str, Any]) -> str:
    """
    SHA-256 of the method and the settings of a run, in hexadecimal, without the locations of its data and models.

    Args:
        method (`str`): `"federated"`, `"centralized"` or `"local"`.
        values (`Mapping[str, Any]`): The recipe of the run.

    Raises:
        CommandError: If a key of the recipe is not a string.
    """
    settings = copy.deepcopy(dict(values))
    for keys, name in _fields(settings):
        place = section_at(settings, keys)
        if name in _PARTS_OF_LOCATIONS:  # also if it is null, as in a recipe for a local copy
            del place[name]
        elif _is_location(place, name):
            place[name] = "set"  # a recipe with a test_path, for example, differs from a recipe without
    return _sha256(method, settings)


def full_digest(method: str, values: Mapping[str, Any]) -> str:
    """SHA-256 of the method and all settings, in hexadecimal. The arguments are those of [`settings_digest`]."""
    return _sha256(method, values)


def file_times_digest(values: Mapping[str, Any]) -> str:
    """
    SHA-256 of the paths, sizes and modification times of the local files that a recipe names, in hexadecimal.

    Files with the same digest have not been written in between, so their contents need not be hashed again.

    Args:
        values (`Mapping[str, Any]`): The recipe of a run. A name that is not a local file or folder, such as a Hub id,
            has no files.
    """
    digest = hashlib.sha256()
    for path in sorted({str(section_at(values, keys)[name]) for keys, name in locations(values)}):
        for file in sorted((Path(path), *Path(path).rglob("*"))):
            if file.is_file():
                status = file.stat()
                digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def locations(values: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """
    The fields of a recipe that are set and say where data or models are: the keys of the section, and the name.

    Args:
        values (`Mapping[str, Any]`): The recipe of a run.
    """
    yield from ((keys, name) for keys, name in _fields(values) if _is_location(section_at(values, keys), name))


def section_at(values: Mapping[str, Any], keys: Sequence[Any]) -> Any:
    """
    The part of a recipe that a sequence of keys leads to.

    Args:
        values (`Mapping[str, Any]`): The recipe.
        keys (`Sequence`): Names of fields and positions in lists, from the outside to the inside.
    """
    return functools.reduce(operator.getitem, keys, values)


def _fields(values: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], str]]:
    """The fields of locations that a recipe contains, also those that are null."""
    places: dict[tuple[Any, ...], tuple[Any, Sequence[str]]] = {
        (section,): (values.get(section), names) for section, names in _LOCATIONS.items()
    }
    models = values.get("client_models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        places["client_models", index] = (model, _LOCATIONS["model"])
    federation = values.get("federation")
    options = federation.get("distillation_kwargs") if isinstance(federation, Mapping) else None
    places["federation", "distillation_kwargs"] = (options, _WEIGHING_MODELS)
    return [
        (keys, name)
        for keys, (section, names) in places.items()
        for name in names
        if isinstance(section, Mapping) and name in section
    ]


def has_inputs(record: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
    """
    Whether the run of a record has read certain examples and weights.

    Args:
        record (`Mapping[str, Any]`): The record of a finished run.
        inputs (`Mapping[str, Any]`): The hashes by the fields of a record. A record of an older version has no hashes
            of weights, so its inputs count as other ones.
    """
    return all((record.get(name) or None) == (inputs.get(name) or None) for name in INPUT_FIELDS)


def _is_location(section: Mapping[str, Any], name: str) -> bool:
    return section[name] is not None and section[name] != TFIDF  # the value of TF-IDF names no place


def _sha256(method: str, values: Mapping[str, Any]) -> str:
    included = {name: value for name, value in values.items() if name != "benchmark"}
    included["training"] = {name: value for name, value in values["training"].items() if name != "output_dir"}
    if isinstance(included.get("data"), dict):
        included["data"] = _with_test_default(included["data"])
    content = {"method": method, "recipe": included}
    with command_errors("keys of the recipe must be strings"):
        # `default` converts dates, which YAML has and JSON does not have.
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _with_test_default(data: dict[str, Any]) -> dict[str, Any]:
    """
    Make the default of the test examples part of the digest.

    In version 0.1, the default was `test_clients: 0.2`. Records of that default have none of the fields, and belong to
    recipes that now name the old default.
    """
    given = {name: data[name] for name in TEST_FIELDS if data.get(name) is not None}
    if not given:
        return {**data, "test": "default"}
    if given == {"test_clients": 0.2}:
        return {name: value for name, value in data.items() if name != "test_clients"}
    return data
