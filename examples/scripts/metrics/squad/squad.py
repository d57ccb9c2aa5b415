"""Exact match and F1 of answers with the interface of `evaluate.load("squad")`, without a download."""

from typing import Any

import evaluate
from datasets import Features, List, Value

from hf_federated.tasks import metrics


class Squad(evaluate.Metric):
    """Exact match and F1 in percent, from the metrics of `hf_federated.tasks.metrics`."""

    def _info(self) -> evaluate.MetricInfo:
        answers = {"text": List(Value("string")), "answer_start": List(Value("int32"))}
        return evaluate.MetricInfo(
            description="Exact match and F1 of extracted answers, in percent.",
            citation="",
            inputs_description="predictions: id and prediction_text. references: id and answers, as in SQuAD.",
            features=Features(
                {
                    "predictions": {"id": Value("string"), "prediction_text": Value("string")},
                    "references": {"id": Value("string"), "answers": answers},
                }
            ),
        )

    def _compute(self, predictions: list[dict[str, Any]], references: list[dict[str, Any]]) -> dict[str, Any]:
        texts = {row["id"]: row["prediction_text"] for row in predictions}
        inputs = {
            "predictions": [texts[row["id"]] for row in references],
            "references": [row["answers"]["text"] for row in references],
        }
        return {
            "exact_match": 100 * metrics.ExactMatch().compute(**inputs)["exact_match"],
            "f1": 100 * metrics.TokenF1().compute(**inputs)["token_f1"],
        }
