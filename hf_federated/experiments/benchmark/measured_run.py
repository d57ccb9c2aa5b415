"""Execute one run of a benchmark: a federation or a baseline, without progress bars."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from transformers import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_federated.experiments.baselines import metrics_of
from hf_federated.experiments.benchmark.identity import file_times_digest
from hf_federated.experiments.benchmark.run_inputs import hash_examples, hash_weights
from hf_federated.experiments.execution import Run, build_run, run_baseline, run_federated
from hf_federated.experiments.model_loading import without_head_warnings
from hf_federated.experiments.predictions import PREDICTIONS_NAME, write_predictions
from hf_federated.experiments.recipe.recipe import parse_recipe
from hf_federated.experiments.recipe.schema import RecipeError
from hf_federated.experiments.scoring import Scorer


# Logged values of a method that are kept in the record of a run: the aggregation weight of each client, whether an LLM
# failed to provide weights, the ratio of feedback to distillation, the losses of distillation, and the errors of
# averaged and truncated LoRA factors.
WEIGHT_PREFIX = "federated/weight/"
METHOD_LOGS = {
    "federated/llm_fell_back",
    "federated/feedback_ratio",
    "federated/server_distillation_loss",
    "federated/client_distillation_loss",
    "federated/lora_inexactness",
    "federated/lora_inexactness_max",
    "federated/lora_truncation",
    "federated/lora_truncation_max",
}
# Fields of a federation that baselines do not use.
EXCHANGE_FIELDS = ("aggregation", "aggregation_kwargs", "distillation", "distillation_kwargs")


def measure_run(values: dict[str, Any], method: str, folder: Path) -> dict[str, Any]:
    """
    Execute one run of a benchmark without progress bars, and return its results. The model is not saved.

    If the recipe saves checkpoints and an interrupted run left a checkpoint in `folder`, a federated run resumes from
    the last checkpoint. A run that finishes removes its checkpoints.

    If each test example has one label, the run writes its predictions to `predictions.npz` in `folder`.

    Args:
        values (`dict[str, Any]`): The recipe of the run, as returned by
            [`~hf_federated.experiments.recipe.yaml_file.read_values`].
        method (`str`): `"federated"`, `"centralized"` or `"local"`.
        folder (`Path`): Output folder, which only this run uses.

    Returns:
        `dict[str, Any]`: The results that [`~hf_federated.experiments.benchmark.benchmark.run_benchmark`] expects of a
            run.

    Raises:
        RecipeError: If the recipe cannot be run, or a run that resumed from a checkpoint fails.
    """
    file_times = file_times_digest(values)  # before the files are read
    recipe = parse_recipe(values)
    if method != "federated":  # baselines train the server's model without communication
        settings = {name: value for name, value in recipe.federation.items() if name not in EXCHANGE_FIELDS}
        recipe = dataclasses.replace(recipe, client_models=[], federation=settings)
    training = {"disable_tqdm": True, "report_to": "none", **recipe.training}
    with without_head_warnings():
        run = build_run(dataclasses.replace(recipe, training=training, plots=False), str(folder))
        run.trainer.remove_callback(PrinterCallback)
        scorer = run.scorer(method)
        if method == "federated":
            result = _resume_federated(run, folder, scorer)
        else:
            result = vars(run_baseline(run, method, scorer=scorer))
    predictions = scorer.predictions
    if predictions:
        write_predictions(folder / PREDICTIONS_NAME, predictions)
    return {
        "num_clients": len(run.data.train),
        **result,
        "predictions": str(folder / PREDICTIONS_NAME) if predictions else None,
        "metric": run.metric,
        "lower_is_better": run.data.task.lower_is_better,
        "scale": recipe.scale,
        "test_source": f"{len(run.data.raw.test)} examples{run.data.raw.test_source}",
        **hash_examples(run.data.raw),
        "weights": hash_weights(values),
        "file_times": file_times,
    }


def _resume_federated(run: Run, folder: Path, scorer: Scorer) -> dict[str, Any]:
    """Run the federation from its last checkpoint, if there is one, and remove the checkpoints at the end."""
    has_checkpoint = folder.is_dir() and get_last_checkpoint(str(folder)) is not None
    run.trainer.args.resume_from_checkpoint = True if has_checkpoint else None
    try:
        result = run_federated(run, scorer)
    except Exception as error:
        if not has_checkpoint:
            raise
        raise RecipeError(
            f"{error} (The run resumed from a checkpoint in {folder}. Delete the checkpoint to start anew.)"
        ) from error
    num_rounds = run.trainer.state.max_steps
    result |= {"num_rounds": num_rounds, "step_name": run.step_name}
    result |= _read_logs(run.trainer.state.log_history, num_rounds)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return result


def _read_logs(logs: list[dict[str, Any]], num_rounds: int | None) -> dict[str, Any]:
    """Read metrics and logged values of each round, and the number of failed updates, from the log history."""
    rounds: dict[int, dict[str, float]] = {}
    for entry in logs:
        values = metrics_of(entry)
        method_names = (name for name in entry if name.startswith(WEIGHT_PREFIX) or name in METHOD_LOGS)
        values |= {name.removeprefix("federated/"): entry[name] for name in method_names}
        if values:
            rounds.setdefault(entry["step"], {}).update(values)
    history = [{"round": number, **values} for number, values in sorted(rounds.items())]
    failed = [entry["federated/num_failed"] for entry in logs if "federated/num_failed" in entry]
    # The number is unknown if some rounds were not logged.
    return {"history": history, "num_failed": sum(failed) if len(failed) == num_rounds else None}
