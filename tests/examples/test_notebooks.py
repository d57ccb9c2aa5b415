"""The example notebooks are stored with clean outputs, and run on tiny inputs."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import check_prose
import pytest


EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
MACHINE_PATH = re.compile(r"/(?:tmp|work|root|home|Users|var|mnt)/|site-packages|[A-Z]:\\\\|\.venv")


def read(name: str) -> dict[str, Any]:
    return json.loads((EXAMPLES / name).read_text(encoding="utf-8"))


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def settings(notebook: dict[str, Any]) -> dict[str, Any]:
    """The assignments of the cell of settings."""
    cells = [cell for cell in code_cells(notebook) if cell["metadata"].get("tags") == ["parameters"]]
    assert len(cells) == 1
    return {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(source(cells[0])).body}


def test_readme_lists_every_notebook():
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert NAMES and sorted(set(re.findall(r"\((\w+\.ipynb)\)", readme))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_small_and_has_clean_metadata(name: str):
    assert (EXAMPLES / name).stat().st_size < 400_000
    notebook = read(name)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    cells = notebook["cells"]
    assert [cell["id"] for cell in cells] == [f"cell-{number}" for number in range(len(cells))]
    assert all(set(cell["metadata"]) <= {"tags"} for cell in cells)
    assert len(code_cells(notebook)) <= 12


@pytest.mark.parametrize("name", NAMES)
def test_notebook_has_outputs_of_one_run_without_errors(name: str):
    cells = code_cells(read(name))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(outputs) >= 5 and cells[-1]["outputs"]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert all(output["name"] == "stdout" for output in outputs if output["output_type"] == "stream")


def test_text_classification_notebook_shows_partition_and_learning_curve():
    outputs = [output for cell in code_cells(read("text_classification.ipynb")) for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


@pytest.mark.parametrize("name", NAMES)
def test_notebook_contains_no_path_of_a_machine(name: str):
    notebook = read(name)
    texts = [source(cell) for cell in notebook["cells"]]
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            values = [output.get("text", ""), *output.get("data", {}).values()]
            texts += [
                "".join(value)
                for key, value in zip(["text", *output.get("data", {})], values, strict=True)
                if not key.startswith("image/")
            ]
    assert [match.group() for text in texts for match in MACHINE_PATH.finditer(text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_notebook_names_models_and_data_of_the_hub(name: str):
    values = {key: value for key, value in settings(read(name)).items() if "MODEL" in key or key == "DATA"}
    assert "DATA" in values and len(values) >= 2
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", value) for value in values.values())


@pytest.mark.parametrize("name", NAMES)
def test_links_of_notebook_to_the_repository_exist(name: str):
    texts = "\n".join(source(cell) for cell in read(name)["cells"] if cell["cell_type"] == "markdown")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", texts) if not link.startswith("https://")]
    assert [link for link in links if not (EXAMPLES / link).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_prose_of_notebook_is_plain(name: str):
    hits = []
    for cell in read(name)["cells"]:
        prose = check_prose.markdown_prose if cell["cell_type"] == "markdown" else check_prose.python_prose
        for _, text in prose(source(cell)):
            hits += [pattern.pattern for pattern in check_prose.PATTERNS if pattern.search(text)]
    assert hits == []


def load_execute() -> ModuleType:
    """The script `examples/execute.py` as a module."""
    pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    spec = importlib.util.spec_from_file_location("execute", EXAMPLES / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, directory: Path, results: str, **values: Any) -> dict[str, Any]:
    """
    Run a stored notebook with other settings.

    Args:
        name (`str`): File name of the notebook.
        directory (`Path`): Working directory of the notebook.
        results (`str`): Expression that is evaluated after the last cell. Its value is a dictionary of JSON values.
        values (`Any`): Settings of this run.

    Returns:
        `dict[str, Any]`: The value of `results`.
    """
    script = load_execute()
    import nbformat

    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({results}))"))
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    script.execute(notebook, settings, directory, timeout=300)
    assert [cell.source for cell in notebook.cells[:-1]] == sources  # the settings of the run are not stored
    return json.loads(notebook.cells[-1].outputs[-1].text)


@pytest.mark.slow
def test_text_classification_notebook_learns_over_clients(tmp_path, small_encoder_dir, reviews_dir):
    results = run(
        "text_classification.ipynb",
        tmp_path,
        """{
            "centralized": evaluations(trainer),
            "federated": evaluations(federated_trainer),
            "sizes": list(clients.num_rows.values()),
            "rounds": federated_trainer.ledger.rounds(),
            "parameters": parameters,
            "labels": [row["label"] for row in classify(["a dull film", "a bright film"])],
        }""",
        MODEL=small_encoder_dir,
        DATA=reviews_dir,
        NUM_TRAIN=120,
        NUM_TEST=40,
        NUM_ROUNDS=20,
        LEARNING_RATE=3e-3,
        ALPHA=10.0,
    )
    # The word "dull" or "bright" decides the label, so both runs learn to separate the labels.
    assert len(results["centralized"]) == len(results["federated"]) == 20
    assert results["centralized"][-1] > 0.9 and results["federated"][-1] > 0.9
    assert results["labels"] == ["rotten", "fresh"]
    assert results["sizes"] == [24] * 5
    payload = 5 * 4 * results["parameters"]  # five clients, float32
    assert len(results["rounds"]) == 20
    assert all(payload < row["bytes_up"] < 1.5 * payload for row in results["rounds"])
    assert all((tmp_path / "outputs" / f"{name}.png").exists() for name in ("partition", "learning_curve"))


@pytest.mark.slow
def test_colab_notebook_trains_and_shows_its_run(tmp_path, small_encoder_dir, reviews_dir):
    """On a CPU. The notebook states that it is not yet measured on a GPU."""
    results = run(
        "colab_kaggle.ipynb",
        tmp_path,
        """{
            "state": run.view.state,
            "accuracy": [value for _, value in run.curve("eval_accuracy")],
            "bytes": [down, up],
            "labels": [row["label"] for row in classify(["a dull film", "a bright film"])],
        }""",
        MODEL=small_encoder_dir,
        DATA=reviews_dir,
        NUM_TRAIN=120,
        NUM_TEST=40,
        NUM_CLIENTS=5,
        CLIENTS_PER_ROUND=5,
        NUM_ROUNDS=20,
        LEARNING_RATE=1e-2,
        ALPHA=10.0,
    )
    assert results["state"] == "complete" and len(results["accuracy"]) == 20
    assert results["accuracy"][-1] > 0.9
    assert results["labels"] == ["rotten", "fresh"]
    assert min(results["bytes"]) > 0
    folder = tmp_path / "outputs" / "colab-kaggle"
    assert {"README.md", "learning_curve.svg", "_live_report.html"} <= {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_lora_notebook_lowers_loss_and_sends_adapter_only(tmp_path, chat_model_dir, questions_dir):
    pytest.importorskip("trl", reason="needs the extra `trl`")
    results = run(
        "lora_sft.ipynb",
        tmp_path,
        """{
            "loss": [loss_before, loss_after],
            "parties": sorted(ledger.index),
            "sent": per_round.tolist(),
            "adapter": adapter,
            "model": model,
            "saved": sorted(path.name for path in Path("outputs/lora-sft").glob("*.safetensors")),
            "answers": [before, after],
        }""",
        MODEL=chat_model_dir,
        DATA=questions_dir,
        NUM_TRAIN=30,
        NUM_TEST=6,
        NUM_ROUNDS=3,
        LOCAL_STEPS=3,
        LEARNING_RATE=2e-2,
    )
    assert results["loss"][1] < results["loss"][0] - 1.0  # every question has the same answer
    assert results["parties"] == ["kind 0", "kind 1", "kind 2"]
    assert results["adapter"] < results["model"] / 2
    assert all(4 * results["adapter"] < sent < 4 * results["model"] for sent in results["sent"])
    assert results["saved"] == ["adapter_model.safetensors"]
    assert results["answers"][0] != results["answers"][1]


@pytest.mark.slow
def test_different_models_notebook_teaches_the_server(tmp_path, small_encoder_dir, large_encoder_dir, reviews_dir):
    results = run(
        "different_models.ipynb",
        tmp_path,
        """{
            "layers": table["layers"].tolist(),
            "alone": [row["eval_accuracy"] for row in alone.client_metrics.values()],
            "clients": [row["eval_accuracy"] for row in trainer.client_metrics.values()],
            "server": server,
            "scores": scores,
            "sent": trainer.ledger.clients(),
            "alone_sent": alone.ledger.bytes_up,
            "parameters": trainer.model.num_parameters(),
        }""",
        LARGE_MODEL=large_encoder_dir,
        SMALL_MODEL=small_encoder_dir,
        DATA=reviews_dir,
        NUM_PRIVATE=80,
        NUM_PUBLIC=40,
        NUM_TEST=40,
        NUM_ROUNDS=10,
        LOCAL_EPOCHS=6,
        LEARNING_RATE=3e-3,
    )
    assert results["layers"] == [4, 4, 3, 3]
    assert results["scores"] == 4 * 40 * 2
    for row in results["sent"].values():
        # Scores and headers of a few messages, and no parameters.
        assert results["scores"] < row["bytes_up"] / 10 < 4 * results["parameters"] / 4
    # The word "dull" or "bright" decides the label. The server learns it from scores alone.
    assert results["server"] > 0.9
    assert min(results["alone"]) > 0.9 and min(results["clients"]) > 0.9 and len(results["clients"]) == 4
    assert results["alone_sent"] < sum(row["bytes_up"] for row in results["sent"].values())


def test_unknown_setting_is_refused(tmp_path):
    script = load_execute()
    assert script.override("A = 1\nB = 'x'", {"B": "y"}) == "A = 1\nB = 'x'\nB = 'y'"
    with pytest.raises(ValueError, match=r"no settings \['C'\]; its settings are \['A', 'B'\]"):
        script.override("A = 1\nB = 'x'", {"C": 2})


def test_stored_notebook_keeps_no_metadata_and_no_standard_error():
    script = load_execute()
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    streams = [("stdout", "a"), ("stderr", "warning"), ("stdout", "b")]
    cell = new_code_cell(
        "print('a')",
        metadata={"tags": ["parameters"], "execution": {"iopub.execute_input": "today"}},
        outputs=[new_output("stream", name=name, text=text) for name, text in streams],
    )
    notebook = script.clean(
        new_notebook(cells=[cell], metadata={"language_info": {"name": "python", "version": "3.11"}})
    )
    assert notebook.metadata == script.METADATA
    assert notebook.cells[0].metadata == {"tags": ["parameters"]}
    assert [(output.name, output.text) for output in notebook.cells[0].outputs] == [("stdout", "ab")]
