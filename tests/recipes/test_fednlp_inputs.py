"""Tests of `prepare_data.py` of the FedNLP recipes, which converts an ONNX graph with unnamed matrices."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn


SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "fednlp" / "prepare_data.py"))
NAMES = ["up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias"]


def layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(3, 5), "down": nn.Linear(5, 3), "norm": nn.LayerNorm(3)})


def graph() -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Build the exported graph of `layers`: x @ W + b twice with the bias on either side, then the layer norm."""
    state = {name: value.numpy() for name, value in layers().state_dict().items()}
    numbered = {"up.weight": "onnx::MatMul_7", "down.weight": "onnx::MatMul_8"}
    weights = {
        numbered.get(name, f"model.0.auto_model.{name}"): value.T if name in numbered else value
        for name, value in state.items()
    }
    operations = {
        "a": ["x", "onnx::MatMul_7"],
        "b": ["model.0.auto_model.up.bias", "a"],
        "c": ["b", "onnx::MatMul_8"],
        "d": ["c", "model.0.auto_model.down.bias"],
        "e": ["d", "model.0.auto_model.norm.weight", "model.0.auto_model.norm.bias"],
    }
    return weights, operations


def test_matrices_get_the_name_of_the_added_bias():
    state = SCRIPT["name_weights"](*graph())
    expected = layers().state_dict()
    assert sorted(state) == sorted(expected) == sorted(NAMES)
    for name, value in expected.items():
        assert torch.equal(torch.from_numpy(state[name].copy()), value), name


def test_matrix_without_a_bias_raises():
    weights, operations = graph()
    del operations["d"]
    with pytest.raises(ValueError, match=r"\['onnx::MatMul_8'\], so these matrices have no names"):
        SCRIPT["name_weights"](weights, operations)


def test_duplicate_tensor_names_raise():
    weights, operations = graph()
    operations["d"] = ["c", "model.0.auto_model.up.bias"]
    with pytest.raises(ValueError, match="Two tensors have the same name"):
        SCRIPT["name_weights"](weights, operations)


def test_read_graph_from_file(tmp_path):
    onnx = pytest.importorskip("onnx", reason="onnx is a requirement of the script, not of the package")
    weights, operations = graph()
    kinds = {"a": "MatMul", "b": "Add", "c": "MatMul", "d": "Add", "e": "LayerNormalization"}
    written = onnx.helper.make_graph(
        [onnx.helper.make_node(kinds[output], inputs, [output]) for output, inputs in operations.items()],
        "layers",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 3])],
        [onnx.helper.make_tensor_value_info("e", onnx.TensorProto.FLOAT, [None, 3])],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in weights.items()],
    )
    onnx.save(onnx.helper.make_model(written), tmp_path / "layers.onnx")
    read, inputs = SCRIPT["read_graph"](tmp_path / "layers.onnx")
    assert inputs == operations
    assert read.keys() == weights.keys() and all(np.array_equal(read[name], weights[name]) for name in read)
