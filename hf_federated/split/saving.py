"""What a party of a split model saves, and how the parts become one ordinary model or adapter again.

A party writes its own blocks alone, under the names and numbers that they have in the whole model. With an adapter it
writes that of its blocks and no weight of the base. A client adds its tokenizer, which the merged folder gets too.
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
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME

from .adapters import adapter_state, add_adapter, load_adapter, merge_adapters, whole_peft_config
from .cut import ROLES, Cut
from .parts import Part


PARTS_NAME = "split_parts.json"
_ADAPTER_CONFIG_NAME = "adapter_config.json"
_OF_ONE_PARTY = {
    "base_model_name_or_path",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "peft_version",
    "revision",
    "transformers_version",
    "use_cache",
}


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
    Write the parts that one party holds.

    Args:
        parts (`Sequence[Part]`): A client's head and tail, or the server's body.
        config (`PretrainedConfig`): The whole model's.
        directory (`str` or `os.PathLike`): Where to. It is created.
        peft_config (`PeftConfig`, *optional*): What the parts' adapters were made from; then they alone are written.
        generation_config (`GenerationConfig`, *optional*): The whole model's, which is written where its weights are.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The client's.
        run (`Mapping`, *optional*): What says of which run they are, and of which step: parts of two are not merged.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if peft_config is None:
        state = whole_weights(parts, config)
    else:
        state = {name: value for part in parts for name, value in adapter_state(part).items()}
        whole_peft_config(peft_config, config, parts[0]).save_pretrained(os.fspath(path))
    _write(state, path / (SAFE_WEIGHTS_NAME if peft_config is None else ADAPTER_NAME))
    config.save_pretrained(path)
    if generation_config is not None and peft_config is None:
        generation_config.save_pretrained(path)
    files = [] if tokenizer is None else tokenizer.save_pretrained(os.fspath(path))
    described = {
        "cut": dataclasses.asdict(parts[0].cut),
        "roles": [part.role for part in parts],
        "adapter": peft_config is not None,
        "tokenizer": sorted(Path(own).relative_to(path).as_posix() for own in files),
        "run": None if run is None else dict(run),
    }
    (path / PARTS_NAME).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def load_saved_parts(parts: Sequence[Part], directory: str | os.PathLike[str]) -> None:
    """
    Take back what `save_parts` wrote.

    Args:
        parts (`Sequence[Part]`): The same parts, with the same adapters.
        directory (`str` or `os.PathLike`): From where.

    Raises:
        ValueError: If the directory holds other parts, or a file of it is missing or damaged.
    """
    described = _describe(Path(directory))
    found, own = (described["cut"], described["roles"]), (parts[0].cut, [part.role for part in parts])
    if found != own:
        raise ValueError(f"{os.fspath(directory)} holds {found[1]} of {found[0]}, and {own[1]} of {own[0]} is wanted.")
    state = _read(Path(directory), described["adapter"])
    if described["adapter"]:
        load_adapter(parts, state)
        return
    with torch.no_grad():
        for part in parts:
            for name, parameter in part.originals():
                stored = name if name in state else f"{part.layout.embedding}.weight"
                if stored not in state or state[stored].shape != parameter.shape:
                    raise ValueError(f"{name} of shape {tuple(parameter.shape)} is not in {os.fspath(directory)}.")
                parameter.copy_(state[stored])


def merge_parts(directories: Sequence[str | os.PathLike[str]], output_dir: str | os.PathLike[str]) -> None:
    """
    Build the ordinary whole model, or PEFT adapter, from what the parties saved. It needs no network.

    The whole model is in memory for this, once. Config, generation config and tokenizer are those of the party that
    has the head.

    Args:
        directories (`Sequence[str | os.PathLike]`): One for each party: together head, body and tail.
        output_dir (`str` or `os.PathLike`): Where to, which is none of them. It is created.

    Raises:
        ValueError: If these are not the parts of one cut of one model after one step of one run, or one is missing or
            there twice, or a weight or a file of the tokenizer is missing, or a file is damaged. Nothing is written
            then.

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
    >>> merge_parts([folder / "client", folder / "server"], folder / "whole")
    >>> AutoModelForCausalLM.from_pretrained(folder / "whole").config.num_hidden_layers
    4
    ```
    """
    paths = [Path(directory) for directory in directories]
    described = [_describe(path) for path in paths]
    roles = [role for one in described for role in one["roles"]]
    if sorted(roles) != sorted(ROLES):
        raise ValueError(f"A model is merged from one each of {', '.join(ROLES)}; these directories hold {roles}.")
    for path, one in zip(paths, described, strict=True):
        for name in ("cut", "adapter"):
            if one[name] != described[0][name]:
                raise ValueError(f"{path} has {name}={one[name]} and {paths[0]} has {described[0][name]}.")
        for name in (CONFIG_NAME, *([_ADAPTER_CONFIG_NAME] if one["adapter"] else [])):
            if _lasting(path / name) != _lasting(paths[0] / name):
                raise ValueError(f"{path} and {paths[0]} have the parts of different models: their {name} differ.")
    runs = {str(path): one.get("run") for path, one in zip(paths, described, strict=True)}
    if len({json.dumps(own, sort_keys=True) for own in runs.values()}) > 1:
        raise ValueError(f"These are parts of different runs or steps: {runs}.")
    output = Path(output_dir)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file: choose a directory.")
    if any(output.resolve() == path.resolve() for path in paths):
        raise ValueError(f"{output} holds parts, which the whole would be written over: choose another directory.")
    client = next(path for path, one in zip(paths, described, strict=True) if "head" in one["roles"])
    tokenizer = _tokenizer_files(client, described[paths.index(client)])
    adapter = described[0]["adapter"]
    states = [_read(path, adapter) for path in paths]
    for path, one, state in zip(paths, described, states, strict=True):
        _check_whole(path, one, state)
        wrong = sorted(name for name, value in state.items() if not value.isfinite().all())
        if wrong:
            raise ValueError(f"{path}: {wrong[0]} has values that are not finite.")
    whole = merge_adapters(states, described[0]["cut"].num_blocks) if adapter else _merge_weights(paths, states)
    output.mkdir(parents=True, exist_ok=True)
    for name in tokenizer:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(client / name, output / name)
    if adapter:
        _write(whole, output / ADAPTER_NAME)
        shutil.copyfile(client / _ADAPTER_CONFIG_NAME, output / _ADAPTER_CONFIG_NAME)
        return
    shutil.copyfile(client / CONFIG_NAME, output / CONFIG_NAME)
    if (client / GENERATION_CONFIG_NAME).is_file():
        shutil.copyfile(client / GENERATION_CONFIG_NAME, output / GENERATION_CONFIG_NAME)
    save_torch_state_dict(whole, output)


def whole_weights(parts: Sequence[Part], config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Parts' weights by their names in the whole model; a tied matrix is the head's."""
    state = {}
    for part in parts:
        state.update({part.original_name(name): value for name, value in part.model.state_dict().items()})
        if part.role == "tail" and config.tie_word_embeddings:
            del state[f"{part.layout.output}.weight"]
    return state


def rename_whole(parts: Sequence[Part], state: dict[str, Any]) -> None:
    """
    Give weights under the whole model's names those that they have in a [`SplitModel`].

    Args:
        parts (`Sequence[Part]`): Those of the split model.
        state (`dict[str, Any]`): Weights by name; it is changed. Other names are left.
    """
    places = {"head": "client_head", "body": "server_body", "tail": "client_tail"}
    whole = {name: value for name, value in state.items() if name.split(".")[0] not in places.values()}
    for part in parts:
        for own in part.model.state_dict():
            original = part.original_name(own)
            if original not in whole and original == f"{part.layout.output}.weight":
                original = f"{part.layout.embedding}.weight"
            if original in whole:
                state[f"{places[part.role]}.model.{own}"] = whole[original]
                state.pop(original, None)


def _write(state: dict[str, torch.Tensor], path: Path) -> None:
    own = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(own, path, metadata={"format": "pt"})


def _read(path: Path, adapter: bool) -> dict[str, torch.Tensor]:
    name = ADAPTER_NAME if adapter else SAFE_WEIGHTS_NAME
    if not (path / name).is_file():
        raise ValueError(f"{path} has no {name}: it is not a whole save of a party.")
    try:
        return load_file(path / name)
    except SafetensorError as error:
        raise ValueError(f"{path / name} is damaged, or no safetensors: {error}.") from error


def _merge_weights(paths: Sequence[Path], states: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for path, state in zip(paths, states, strict=True):
        # A table of frequencies that is saved with the weights is in every part.
        twice = sorted(name for name in whole.keys() & state.keys() if not torch.equal(whole[name], state[name]))
        if twice:
            raise ValueError(f"{path} has {twice[0]} too: these are not the parts of one cut.")
        whole.update(state)
    return whole


def _check_whole(path: Path, described: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
    """Compare a party's weights with those that parts of its model, of a class that is known here, have."""
    values = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    if values.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    config = AutoConfig.from_pretrained(path)
    parts = [Part(config, described["cut"], role) for role in described["roles"]]
    if described["adapter"]:
        peft_config = PeftConfig.from_pretrained(os.fspath(path))
        # The weights are there: how they began does not matter.
        peft_config.inference_mode = False
        if isinstance(peft_config, LoraConfig):
            peft_config.init_lora_weights = True
        add_adapter(parts, config, peft_config)
        expected = {name: own.shape for part in parts for name, own in adapter_state(part).items()}
    else:
        expected = {name: own.shape for name, own in whole_weights(parts, config).items()}
    found = {name: own.shape for name, own in state.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        there, wanted = (tuple(own[name]) if name in own else "none" for own in (found, expected))
        raise ValueError(
            f"{path} is not what its {PARTS_NAME} says: the shape of {name} is {there}, and {wanted} in such parts."
        )


def _tokenizer_files(path: Path, described: dict[str, Any]) -> list[str]:
    """The files of the tokenizer that a party saved, by their names in its directory."""
    names: list[str] = described.get("tokenizer", [])
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or not (path / name).is_file():
            raise ValueError(f"{path} has no file {name} of its tokenizer: it is not a whole save of a party.")
    return names


def _lasting(path: Path) -> dict[str, Any]:
    """A config without what a trainer or the place of a base sets, which may differ between parties."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        lasting = {name: value for name, value in values.items() if name not in _OF_ONE_PARTY}
        # Sets are written as lists, in any order.
        return {name: sorted(own, key=str) if isinstance(own, list) else own for name, own in lasting.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}.") from error


def _describe(path: Path) -> dict[str, Any]:
    try:
        described = json.loads((path / PARTS_NAME).read_text(encoding="utf-8"))
        known = {name: described[name] for name in ("roles", "adapter")}
        return {**described, **known, "cut": Cut(**described["cut"])}
    except KeyError as error:
        raise ValueError(f"{path / PARTS_NAME} is damaged: it has no {error}.") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no save of a split model's party: {error}.") from error
