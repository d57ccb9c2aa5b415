"""Measures all model families that can be split, and writes the table in `docs/reference/split-families.md`.

python tests/split/family_table.py
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from chatglm_layouts import chatglm  # noqa: E402  # the path is set above
from decoders import DECODERS, batch, decoder, from_config  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from test_split_adapters import ADAPTERS, NO_PREFIX, create_adapted  # noqa: E402
from test_split_chatglm import chatglm_input_ids, with_prefixes  # noqa: E402

from hf_federated import SplitModel  # noqa: E402
from hf_federated.split import LAYOUTS  # noqa: E402


PAGE = ROOT / "docs" / "reference" / "split-families.md"
_MARKERS = re.compile(r"(?<=<!-- families: begin -->\n\n).*?(?=\n<!-- families: end -->)", re.DOTALL)
# A split model with a larger difference does not compute what the whole model computes.
TOLERANCE = 1e-5
CUTS = [(1, 1), (0, 1), (2, 2), (1, 2)]
PADDINGS = (None, "left", "right")
NAMES = {
    "afmoe": "Trinity (AFMoE)",
    "apertus": "Apertus",
    "apertus1p5_text": "Apertus 1.5 (text)",
    "arcee": "Arcee AFM-4.5B",
    "aria_text": "Aria (text)",
    "beam": "Beam",
    "bitnet": "BitNet b1.58",
    "bloom": "BLOOM",
    "chatglm": "ChatGLM-6B",
    "chatglm2": "ChatGLM2-6B, ChatGLM3-6B",
    "codegen": "CodeGen",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "cohere2_moe": "Command A+",
    "cwm": "CWM",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, DeepSeek-R1",
    "diffllama": "DiffLlama",
    "doge": "Doge",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "exaone": "EXAONE 3",
    "exaone4": "EXAONE 4",
    "exaone_moe": "K-EXAONE",
    "falcon": "Falcon",
    "flex_olmo": "FlexOlmo",
    "flint": "Flint",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "glm": "GLM-4-9B",
    "glm4": "GLM-4-0414",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt2": "GPT-2",
    "gpt_bigcode": "SantaCoder, StarCoder",
    "gpt_neo": "GPT-Neo",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt_oss": "gpt-oss",
    "gptj": "GPT-J",
    "granite": "Granite 3",
    "granite_swa": "Granite Swash",
    "granitemoe": "Granite 3 MoE",
    "granitemoe_swa": "Granite Swash MoE",
    "granitemoeshared": "Granite MoE with shared experts",
    "helium": "Helium",
    "hunyuan_v1_dense": "Hunyuan 0.5B to 7B",
    "hunyuan_v1_moe": "Hunyuan-A13B",
    "hy_v3": "Hunyuan 3 (Hy3)",
    "hyperclovax": "HyperCLOVA X SEED Think",
    "internlm3": "InternLM3",
    "iquestcoder": "IQuest-Coder",
    "jais2": "Jais 2",
    "jetmoe": "JetMoE",
    "kolibri1": "Kolibri",
    "laguna": "Laguna",
    "lara_mini": "Lara Mini",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "llama": "Llama, SmolLM, SmolLM2",
    "mellum": "Mellum 2",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "minicpm3": "MiniCPM3",
    "minimax_m2": "MiniMax-M2",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "moshi": "Moshi (text)",
    "mpt": "MPT",
    "nemotron": "Nemotron-4, Minitron",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmo_hybrid": "OLMo Hybrid",
    "olmoe": "OLMoE",
    "opt": "OPT",
    "persimmon": "Persimmon",
    "phi": "Phi-1, Phi-2",
    "phi3": "Phi-3, Phi-4",
    "phimoe": "Phi-3.5-MoE",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3.5-MoE (text)",
    "qwen3_5_text": "Qwen3.5 (text)",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "sarvam_mla": "Sarvam 105B",
    "sarvam_moe": "Sarvam 30B",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "solar_open": "Solar Open",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder2",
    "vaultgemma": "VaultGemma",
}


@dataclass(frozen=True)
class Row:
    """A row of the table: what was measured of a family."""

    family: str
    model_class: str
    logits: float
    gradients: float
    lora: str
    prefixes: str
    generation: str

    @classmethod
    def joined(cls, rows: Iterable[Row]) -> Row:
        """Join the rows of several configs of a family: the largest differences, and all distinct words."""
        rows = list(rows)
        values = []
        for field in fields(cls):
            column = [getattr(row, field.name) for row in rows]
            values.append(
                max(column) if isinstance(column[0], float) else "; ".join(sorted(set(column), reverse=True))
            )
        return cls(*values)

    def text(self) -> str:
        """Format the row in Markdown."""
        numbers = ["0" if value == 0 else f"{value:.0e}" for value in (self.logits, self.gradients)]
        cells = [self.family, f"`{self.model_class}`", *numbers, self.lora, self.prefixes, self.generation]
        return f"| {' | '.join(cells)} |"


def families() -> dict[str, list[str]]:
    """The small models of `decoders.py` by the key of their layout. ChatGLM has other small models."""
    models: dict[str, list[str]] = {}
    for name, config in DECODERS.items():
        models.setdefault(config().model_type, []).append(name)
    return models


def measure(key: str) -> Row:
    """Measure a family."""
    if key.startswith("chatglm"):
        return _measure_chatglm(key)
    return Row.joined(_measure_decoder(key, name) for name in families()[key])


def largest(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference between tensors of the same names."""
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - value).abs().max()) for name, value in expected.items())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Take the gradients of a model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _compare(full_model: Any, split: SplitModel, inputs: dict[str, Any], **kwargs: Any) -> tuple[float, float]:
    """Return the largest difference of logits and gradients. The models share their parameters."""
    expected = full_model(**inputs, **kwargs)
    expected.loss.backward()
    expected_gradients = gradients(full_model)
    output = split(**inputs)
    output.loss.backward()
    tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    difference = float((output.logits - expected.logits)[tokens].abs().max())
    return difference, largest(gradients(full_model), expected_gradients)


def _compare_adapter(name: str, kind: str) -> float:
    """Return the largest difference of the logits, and of the gradients of an adapter, to PEFT on the full model."""
    split, full_model = create_adapted(name, ADAPTERS[kind](name))
    found = 0.0
    for padding in PADDINGS:
        inputs = batch(padding)
        expected, output = full_model(**inputs), split(**inputs)
        expected.loss.backward()
        output.loss.backward()
        tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        found = max(found, float((output.logits - expected.logits)[tokens].abs().max()))
        expected_gradients = gradients(full_model)
        if kind == "prefix":
            actual = [part.prefix.encoder.embedding.weight.grad for part in split.parts]
            (expected_gradient,) = expected_gradients.values()
            found = max(found, float((torch.cat(actual, dim=1) - expected_gradient).abs().max()))
        else:
            trained = [pair for part in split.parts for pair in part.named_original_parameters()]
            named = {f"base_model.model.{name}": p.grad for name, p in trained if p.grad is not None}
            found = max(found, largest(named, expected_gradients))
        split.zero_grad()
    return found


def _generates_equally(full_model: PreTrainedModel, split: SplitModel) -> bool:
    """Whether greedy generation with a cache gives the same tokens, with and without left padding."""
    equal = []
    for padding in (None, "left"):
        inputs = batch(padding)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        expected = full_model.generate(inputs["input_ids"], **settings)
        equal.append(torch.equal(split.generate(inputs["input_ids"], **settings), expected))
    return all(equal)


def _yes(passed: bool, exception: str = "") -> str:
    return f"yes{exception}" if passed else "no"


def _measure_decoder(key: str, name: str) -> Row:
    logits = gradient = 0.0
    for tied, cut in itertools.product((True, False), CUTS):
        config = DECODERS[name]()
        config.tie_word_embeddings = tied
        full_model = from_config(config)
        split = SplitModel.from_model(full_model, *cut)
        for padding in PADDINGS:
            found = _compare(full_model, split, batch(padding), use_cache=False)
            logits, gradient = max(logits, found[0]), max(gradient, found[1])
    full_model = decoder(name)
    # One parameter holds the weights of all experts. PEFT adapts such a parameter as a parameter, or not at all.
    has_experts = any(parameter.dim() == 3 for parameter in full_model.parameters())
    if name in NO_PREFIX or not LAYOUTS[key].supports_prefixes:
        prefixes = "Falcon-7B: no" if name == "falcon" else "no"
    else:
        prefixes = _yes(_compare_adapter(name, "prefix") <= TOLERANCE)
    return Row(
        NAMES[key],
        type(full_model).__name__,
        logits,
        gradient,
        _yes(_compare_adapter(name, "lora") <= TOLERANCE, ", not the experts" if has_experts else ""),
        prefixes,
        _yes(all(_generates_equally(full_model, SplitModel.from_model(full_model, *cut)) for cut in CUTS)),
    )


def _measure_chatglm(key: str) -> Row:
    generation = 1 if key == "chatglm" else 2
    ids = chatglm_input_ids()
    inputs = {"input_ids": ids, "labels": ids}
    found = []
    for cut in CUTS:
        full_model = chatglm(generation)
        found.append(_compare(full_model, SplitModel.from_model(full_model, *cut), inputs))

    def logits_equal(full_model: Callable[..., Any], split: SplitModel, **kwargs: Any) -> bool:
        return bool((full_model(input_ids=ids, **kwargs).logits - split(ids).logits).abs().max() <= TOLERANCE)

    lora = LoraConfig(r=2, target_modules=["query_key_value", "mlp"], init_lora_weights=False)
    adapted = get_peft_model(chatglm(generation), lora).eval()
    full_model = chatglm(generation)
    split = SplitModel.from_model(full_model, 2, 1)
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, full_model(expected).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    generated = split.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    prefix = with_prefixes(split, 3)
    return Row(
        NAMES[key],
        "ChatGLMForConditionalGeneration",
        max(logits for logits, _ in found),
        max(gradient for _, gradient in found),
        _yes(logits_equal(adapted, SplitModel.from_model(adapted, 2, 1))),
        _yes(logits_equal(full_model, split, prefix=prefix)),
        _yes(torch.equal(generated, expected)),
    )


def table(rows: Iterable[Row]) -> str:
    """Format the table in Markdown."""
    head = (
        "| models | class | logits | gradients | LoRA | prefix tuning | generation |\n|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(f"{row.text()}\n" for row in rows)


def page_table() -> str:
    """Return the table of the page."""
    found = _MARKERS.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found.group()


if __name__ == "__main__":
    measured = []
    for layout in sorted(LAYOUTS, key=lambda key: NAMES[key].lower()):
        measured.append(measure(layout))
        print(measured[-1].text(), flush=True)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_MARKERS.sub(lambda _: table(measured), text), encoding="utf-8")
