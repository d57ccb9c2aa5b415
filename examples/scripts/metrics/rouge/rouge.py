"""ROUGE with the arguments and names of `evaluate.load("rouge")`, without a download."""

from typing import Any

from rouge_score.rouge_scorer import RougeScorer

from hf_federated.tasks import metrics


class Rouge(metrics.Rouge):
    """[`~hf_federated.tasks.metrics.Rouge`] with `use_stemmer` as an argument of `compute`, and with ROUGE-Lsum."""

    def _compute(self, predictions: list[str], references: list[str], use_stemmer: bool = False) -> dict[str, Any]:
        scorer = RougeScorer(["rougeLsum"], use_stemmer=use_stemmer)
        pairs = zip(predictions, references, strict=True)
        sums = [scorer.score(reference, prediction)["rougeLsum"].fmeasure for prediction, reference in pairs]
        scores = metrics.Rouge(use_stemmer=use_stemmer).compute(predictions=predictions, references=references)
        return {**scores, "rougeLsum": sum(sums) / len(sums)}
