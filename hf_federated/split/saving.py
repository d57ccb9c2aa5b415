"""Saving of the parts of a split model, and merging of saved parts into a standard model or adapter.

A party saves only its own blocks, with their names and indices in the full model. With an adapter, a party saves the
adapter of its blocks and no weights of the base model. A client also saves its tokenizer, and merging copies it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from peft import LoraConfig, PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME

from ..messages.validation import first_non_finite
from ..utils.untrusted_json import read_json, read_json_object
from .adapters import adapter_state, add_adapter, full_peft_config, load_adapter, merge_adapters, save_weights
from .comparison import PARTY_SPECIFIC
from .conversion import find_conversions, to_checkpoint
from .cut import ROLES, Cut
from .parts import Part


PARTS_NAME = "split_parts.json"
_ADAPTER_CONFIG_NAME = "adapter_config.json"
_PARTY_SPECIFIC = PARTY_SPECIFIC | {"peft_version"}


def save_parts(
    parts: Sequence[Part],
    config: PretrainedConfig,
    directory: str | os.PathLike[str],
    peft_config: PeftConfig | None = None,
    generation_config: GenerationConfig | None = None,
    tokenizer: Any = None,
    run: Mapping[str, Any] | None = None,
) -> None:
    """
    Save the parts of one party.

    Args:
        parts (`Sequence[Part]`): A client's head and tail, or the server's body.
        config (`PretrainedConfig`): The config of the full model.
        directory (`str` or `os.PathLike`): The output directory. It is created if it does not exist.
        peft_config (`PeftConfig`, *optional*):
            The config from which the parts' adapters were created. If given, only the adapters are saved.
        generation_config (`GenerationConfig`, *optional*):
            The generation config of the full model. It is saved only without `peft_config`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The client's tokenizer.
        run (`Mapping`, *optional*):
            JSON values that identify the run and the step. Parts of different runs or steps cannot be merged.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    if peft_config is not None:
        full_peft_config(peft_config, config, parts[0]).save_pretrained(os.fspath(path))
        state = {name: value for part in parts for name, value in adapter_state(part).items()}
        save_weights(state, path / ADAPTER_NAME)
    else:
        save_weights(full_state_dict(parts, config), path / SAFE_WEIGHTS_NAME)
        if generation_config is not None:
            generation_config.save_pretrained(path)
    files = [] if tokenizer is None else tokenizer.save_pretrained(os.fspath(path))
    description = {
        "cut": dataclasses.asdict(parts[0].cut),
        "roles": [part.role for part in parts],
        "adapter": peft_config is not None,
        "tokenizer": sorted(Path(file).relative_to(path).as_posix() for file in files),
        "run": None if run is None else dict(run),
    }
    (path / PARTS_NAME).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load_saved_parts(parts: Sequence[Part], directory: str | os.PathLike[str]) -> None:
    """
    Load weights that `save_parts` saved.

    Args:
        parts (`Sequence[Part]`): The same parts, with the same adapters.
        directory (`str` or `os.PathLike`): The directory of the saved parts.

    Raises:
        ValueError: If the directory contains other parts, or a file is missing or damaged.
    """
    description = _read_description(Path(directory))
    saved = (description["cut"], description["roles"])
    expected = (parts[0].cut, [part.role for part in parts])
    if saved != expected:
        raise ValueError(
            f"{os.fspath(directory)} contains the parts {saved[1]} of {saved[0]}, but the model expects the parts "
            f"{expected[1]} of {expected[0]}. Pass the directory of the same party and cut."
        )
    state = _read_weights(Path(directory), description["adapter"])
    if description["adapter"]:
        load_adapter(parts, state)
        return
    with torch.no_grad():
        for part in parts:
            for name, parameter in part.named_original_parameters():
                # A tied output layer is saved as the embedding.
                stored = name if name in state else f"{part.layout.embedding}.weight"
                if stored not in state or state[stored].shape != parameter.shape:
                    raise ValueError(
                        f"{os.fspath(directory)} has no weight {name} of shape {tuple(parameter.shape)}. Load the "
                        "parts of the same model."
                    )
                parameter.copy_(state[stored])


def merge_parts(directories: Sequence[str | os.PathLike[str]], output_dir: str | os.PathLike[str]) -> None:
    """
    Merge the saved parts of all parties into a standard model or PEFT adapter. Merging needs no network.

    The full model is in memory once. Config, generation config and tokenizer are copied from the directory that
    contains the head.

    Args:
        directories (`Sequence[str | os.PathLike]`):
            One directory per party. Together they must contain one head, one body and one tail.
        output_dir (`str` or `os.PathLike`):
            The output directory, which must not be one of `directories`. It is created if it does not exist.

    Raises:
        ValueError: If the parts have different cuts, models, runs or steps, a part is missing or occurs twice, a
            weight or a tokenizer file is missing, a value is not finite, or a file is damaged. Nothing is written in
            these cases.

    Example:

    ```python
    >>> import tempfile
    >>> from pathlib import Path
    >>> from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    >>> from hf_federated import SplitModel
    >>> from hf_federated.split import merge_parts, save_parts

    >>> config = LlamaConfig(
    ...     vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> split = SplitModel.from_model(LlamaForCausalLM(config))
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_parts([split.client_head, split.client_tail], config, folder / "client")
    >>> save_parts([split.server_body], config, folder / "server")
    >>> merge_parts([folder / "client", folder / "server"], folder / "merged")
    >>> AutoModelForCausalLM.from_pretrained(folder / "merged").config.num_hidden_layers
    4
    ```
    """
    parties = [(Path(directory), _read_description(Path(directory))) for directory in directories]
    roles = [role for _, description in parties for role in description["roles"]]
    if sorted(roles) != sorted(ROLES):
        raise ValueError(
            f"The directories contain the parts {roles}, but merging needs exactly one each of {', '.join(ROLES)}."
        )
    first, shared = parties[0]
    adapter = shared["adapter"]
    for path, description in parties:
        for name in ("cut", "adapter"):
            if description[name] != shared[name]:
                raise ValueError(
                    f"{path} has {name}={description[name]}, but {first} has {name}={shared[name]}. Merge only parts "
                    "of the same split model."
                )
        for name in (CONFIG_NAME, *([_ADAPTER_CONFIG_NAME] if adapter else [])):
            if _shared_settings(path / name) != _shared_settings(first / name):
                raise ValueError(
                    f"{path} and {first} contain parts of different models: their {name} files differ. Merge only "
                    "parts of the same split model."
                )
    runs = {str(path): description.get("run") for path, description in parties}
    if len({json.dumps(run, sort_keys=True) for run in runs.values()}) > 1:
        raise ValueError(
            f"The directories contain parts of different runs or steps: {runs}. Merge only parts of one run and step."
        )
    output = Path(output_dir)
    if output.exists() and not output.is_dir():
        raise ValueError(f"The output directory {output} is a file. Choose a directory.")
    if any(output.resolve() == path.resolve() for path, _ in parties):
        raise ValueError(
            f"The output directory {output} contains parts that merging would overwrite. Choose another directory."
        )
    client, description = next(party for party in parties if "head" in party[1]["roles"])
    copied = [*_tokenizer_files(client, description), _ADAPTER_CONFIG_NAME if adapter else CONFIG_NAME]
    if not adapter and (client / GENERATION_CONFIG_NAME).is_file():
        copied.append(GENERATION_CONFIG_NAME)
    states = {path: _read_weights(path, adapter) for path, _ in parties}
    for path, description in parties:
        _check_weights(path, description, states[path])
        if (not_finite := first_non_finite(states[path])) is not None:
            raise ValueError(f"{path}: {not_finite} has values that are not finite. Save the parts again.")
    merged = merge_adapters(states.values(), shared["cut"].num_blocks) if adapter else _merge_weights(states)
    for name in copied:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(client / name, output / name)
    if adapter:
        save_weights(merged, output / ADAPTER_NAME)
        return
    config = _config(client)
    if config is not None:
        merged = to_checkpoint(Part(config, shared["cut"], "head").model, merged)
    save_torch_state_dict(merged, output)


def save_full_model(
    parts: Sequence[Part],
    config: PretrainedConfig,
    generation_config: GenerationConfig | None,
    directory: str | os.PathLike[str],
    **shards: Any,
) -> None:
    """
    Save all parts as one model in the standard format.

    Args:
        parts (`Sequence[Part]`): The head, the body and the tail.
        config (`PretrainedConfig`): The config of the full model.
        generation_config (`GenerationConfig`, *optional*): The generation config of the full model.
        directory (`str` or `os.PathLike`): The output directory. It is created if it does not exist.
        shards: `max_shard_size`, as in `save_pretrained`.
    """
    config.save_pretrained(directory)
    if generation_config is not None:
        generation_config.save_pretrained(directory)
    save_torch_state_dict(to_checkpoint(parts[0].model, full_state_dict(parts, config)), Path(directory), **shards)


def full_state_dict(parts: Sequence[Part], config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return the weights of parts by their names in the full model. A tied matrix occurs once, as the embedding."""
    state = {}
    for part in parts:
        state.update({part.original_name(name): value for name, value in part.model.state_dict().items()})
        if part.role == "tail" and config.tie_word_embeddings:
            del state[f"{part.layout.output}.weight"]
    return state


def rename_to_part_names(parts: Sequence[Part], state: dict[str, Any]) -> None:
    """
    Rename weights of the full model to their names in a [`SplitModel`], and convert weights of its checkpoints.

    Args:
        parts (`Sequence[Part]`): The parts of the split model.
        state (`dict[str, Any]`): Weights by name. It is modified in place. Unknown names stay unchanged.
    """
    attributes = {"head": "client_head", "body": "server_body", "tail": "client_tail"}
    full_state = {name: value for name, value in state.items() if name.split(".")[0] not in attributes.values()}
    missing = {part.original_name(name) for part in parts for name in part.model.state_dict()} - full_state.keys()
    for conversion in find_conversions(parts[0], full_state, missing) if missing else ():
        full_state.update(conversion.convert(full_state.__getitem__))
        for source, _ in conversion.sources:
            del state[source]
    for part in parts:
        for name in part.model.state_dict():
            original = part.original_name(name)
            if original not in full_state and original == f"{part.layout.output}.weight":
                original = f"{part.layout.embedding}.weight"
            if original in full_state:
                state[f"{attributes[part.role]}.model.{name}"] = full_state[original]
                state.pop(original, None)


def _read_weights(path: Path, adapter: bool) -> dict[str, torch.Tensor]:
    name = ADAPTER_NAME if adapter else SAFE_WEIGHTS_NAME
    if not (path / name).is_file():
        raise ValueError(f"{path} has no file {name}, so the saved parts are incomplete. Save the parts again.")
    try:
        return load_file(path / name)
    except SafetensorError as error:
        raise ValueError(
            f"{path / name} is damaged, or is not a safetensors file: {error}. Save the parts again."
        ) from error


def _merge_weights(states: Mapping[Path, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for path, state in states.items():
        # All parts contain rotary frequencies that are saved with the weights. They are equal, so they can be merged.
        conflicts = sorted(name for name in merged.keys() & state.keys() if not torch.equal(merged[name], state[name]))
        if conflicts:
            raise ValueError(
                f"{path} has the weight {conflicts[0]}, which another directory has with different values. Merge only "
                "parts of the same cut."
            )
        merged.update(state)
    return merged


def _check_weights(path: Path, description: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
    """
    Check names and shapes of a party's weights against newly built parts with the same config.

    Model classes that are not part of `transformers` are not checked.
    """
    config = _config(path)
    if config is None:
        return
    parts = [Part(config, description["cut"], role) for role in description["roles"]]
    if description["adapter"]:
        peft_config = PeftConfig.from_pretrained(os.fspath(path))
        # Only names and shapes are compared, so any initialization works.
        peft_config.inference_mode = False
        if isinstance(peft_config, LoraConfig):
            peft_config.init_lora_weights = True
        add_adapter(parts, config, peft_config)
        built = {name: value for part in parts for name, value in adapter_state(part).items()}
    else:
        built = full_state_dict(parts, config)
    expected, found = ({name: value.shape for name, value in weights.items()} for weights in (built, state))
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            shapes = [tuple(by_name[name]) if name in by_name else "none" for by_name in (found, expected)]
            raise ValueError(
                f"The weights in {path} do not match its {PARTS_NAME}: {name} has shape {shapes[0]}, but the parts "
                f"need shape {shapes[1]}. Save the parts again."
            )


def _config(path: Path) -> PretrainedConfig | None:
    """Load the config in a party's directory. `None` if the model class is not part of `transformers`."""
    values = read_json_object(path / CONFIG_NAME)
    if values.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    config: PretrainedConfig = AutoConfig.from_pretrained(path)
    return config


def _tokenizer_files(path: Path, description: dict[str, Any]) -> list[str]:
    """Return the names of the tokenizer files in a party's directory."""
    names: list[str] = description.get("tokenizer", [])
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or not (path / name).is_file():
            raise ValueError(
                f"{path} has no tokenizer file {name}, so the saved parts are incomplete. Save the parts again."
            )
    return names


def _shared_settings(path: Path) -> dict[str, Any]:
    """Read a config without the settings that may differ between parties, such as the path of the base model."""
    try:
        values = read_json(path)
        shared = {name: value for name, value in values.items() if name not in _PARTY_SPECIFIC}
        # Sets are saved as lists in arbitrary order.
        return {name: sorted(value, key=str) if isinstance(value, list) else value for name, value in shared.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}. Save the parts again.") from error


def _read_description(path: Path) -> dict[str, Any]:
    """Read the description of the parts in a party's directory."""
    try:
        description = read_json(path / PARTS_NAME)
        required = {name: description[name] for name in ("roles", "adapter")}
        return {**description, **required, "cut": Cut(**description["cut"])}
    except KeyError as error:
        raise ValueError(f"{path / PARTS_NAME} is damaged: it has no key {error}. Save the parts again.") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not contain saved parts of a split model: {error}. Pass a directory that save_parts wrote."
        ) from error
