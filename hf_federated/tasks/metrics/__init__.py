"""`evaluate.Metric` classes that work offline, are created directly, and combine with `evaluate.combine`.

```python
evaluate.combine([Accuracy(), F1()]).compute(predictions=[0, 1], references=[0, 0])
```

Metrics that need scikit-learn, seqeval or rouge-score (extra `metrics`) import the package when they compute. Scores
are fractions, not percentages.
"""

from .accuracy import Accuracy
from .bleu import Bleu
from .exact_match import ExactMatch
from .f1 import F1
from .matthews_correlation import MatthewsCorrelation
from .multirc import MultiRC
from .perplexity import Perplexity
from .rouge import Rouge
from .span_f1 import SpanF1
from .token_f1 import TokenF1


__all__ = [
    "F1",
    "Accuracy",
    "Bleu",
    "ExactMatch",
    "MatthewsCorrelation",
    "MultiRC",
    "Perplexity",
    "Rouge",
    "SpanF1",
    "TokenF1",
]
