"""Precision, recall and F1 of whole entities in tag sequences, as computed by seqeval (extra `metrics`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from datasets import Features, List, Value

from ...utils.optional_packages import require_packages
from .base import LocalMetric


SCHEMES = ("IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU")
# seqeval treats tags with any other letter as O.
_POSITIONS = {None: "BIES", "IOB1": "BI", "IOB2": "BI", "IOE1": "IE", "IOE2": "IE", "IOBES": "BIES", "BILOU": "BILU"}


class SpanF1(LocalMetric):
    """
    F1 of entities. A predicted entity is correct if its type, its start and its end are correct.

    Precision is the fraction of predicted entities that are correct. Recall is the fraction of true entities that are
    predicted. Both are micro averages over all examples. F1 = 2·precision·recall / (precision + recall). A division by
    zero gives 0, so the F1 is 0 if there are no entities.

    Args:
        scheme (`str`, *optional*):
            The tagging scheme. By default, tags are read as in the CoNLL-2000 script `conlleval`, for IOB2, IOBES and
            similar schemes: an `I-` tag without a preceding `B-` tag also starts an entity. `"IOB1"`, `"IOB2"`,
            `"IOE1"`, `"IOE2"`, `"IOBES"` and `"BILOU"` are strict: tags that violate the scheme form no entity.
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ImportError: If seqeval is not installed.
        ValueError: If `scheme` is unknown. `compute` raises it if there are no inputs, an example has different
            numbers of predicted and true tags, or a tag does not exist in the scheme.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import SpanF1

    >>> references = [["B-PER", "I-PER", "O", "B-LOC"]]
    >>> SpanF1().compute(predictions=[["B-PER", "I-PER", "O", "B-PER"]], references=references)
    {'span_precision': 0.5, 'span_recall': 0.5, 'span_f1': 0.5}

    ```
    """

    summary = "Precision, recall and F1 of whole entities."
    inputs = "predictions and references: a list of tags per example, such as B-PER, I-PER and O."
    features_of_inputs = Features({"predictions": List(Value("string")), "references": List(Value("string"))})

    def __init__(self, scheme: str | None = None, **kwargs: Any) -> None:
        require_packages("SpanF1", {"metrics": {"seqeval": "seqeval"}})
        if scheme is not None and scheme not in SCHEMES:
            raise ValueError(f"`scheme` is {scheme!r}; allowed are None and {', '.join(map(repr, SCHEMES))}.")
        self.scheme = scheme
        super().__init__(**kwargs)

    def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, Any]:
        from seqeval import scheme as schemes
        from seqeval.metrics import sequence_labeling, v1

        for row, (predicted, true) in enumerate(zip(predictions, references, strict=True)):
            if len(predicted) != len(true):
                raise ValueError(
                    f"Row {row} has {len(predicted)} predicted and {len(true)} true tags. Pass one predicted tag for"
                    " each true tag."
                )
        self._check_tags("predictions", predictions)
        self._check_tags("references", references)
        if self.scheme is None:
            scores = sequence_labeling.precision_recall_fscore_support(
                references, predictions, average="micro", zero_division=0
            )
        else:
            scheme = vars(schemes)[self.scheme]
            scores = v1.precision_recall_fscore_support(
                references, predictions, average="micro", zero_division=0, scheme=scheme
            )
        precision, recall, f1, _ = scores
        return {"span_precision": float(precision), "span_recall": float(recall), "span_f1": float(f1)}

    def _check_tags(self, name: str, rows: Sequence[Iterable[str]]) -> None:
        positions = _POSITIONS[self.scheme]
        wrong = {tag for tag in set().union(*rows) if tag != "O" and not has_position(tag, positions)}
        if not wrong:
            return
        row, tag = next((row, tag) for row, tags in enumerate(rows) for tag in tags if tag in wrong)
        raise ValueError(
            f"Row {row} of the {name} has the tag {tag!r}; allowed are 'O' and entity types with one of the prefixes"
            f" {', '.join(position + '-' for position in positions)}. For tags without spans, use Accuracy."
        )


def has_position(tag: str, positions: str = "BIES") -> bool:
    """
    Whether a tag contains a position within an entity. `B-PER` does, `NOUN` does not.

    Args:
        tag (`str`): The tag.
        positions (`str`, *optional*, defaults to `"BIES"`): The letters of the possible positions.
    """
    return len(tag) > 2 and tag[0] in positions and tag[1] == "-"
