"""F1 of entities with the names of `evaluate.load("seqeval")`, without a download.

The scores of single entity types are missing.
"""

from typing import Any

from hf_federated.tasks import metrics


class Seqeval(metrics.SpanF1):
    """[`~hf_federated.tasks.metrics.SpanF1`] with the names of the Hub's metric, and the accuracy of tags."""

    def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, Any]:
        scores = super()._compute(predictions, references)
        pairs = [
            pair for tags, true in zip(predictions, references, strict=True) for pair in zip(tags, true, strict=True)
        ]
        return {
            **{f"overall_{name}": scores[f"span_{name}"] for name in ("precision", "recall", "f1")},
            "overall_accuracy": sum(tag == true for tag, true in pairs) / len(pairs),
        }
