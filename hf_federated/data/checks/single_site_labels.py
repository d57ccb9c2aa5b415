"""Labels that only one site has, and labels that only the test examples have."""

from __future__ import annotations

from collections.abc import Iterator

from .finding import Finding
from .label_places import LabelPlaces
from .look_alikes import canonical_names
from .many_labels import is_label_like
from .site_table import TEST


def single_site_labels(counts: LabelPlaces) -> Iterator[Finding]:
    """One finding for each label of a single training site, if there are several sites."""
    if counts.is_full or len(counts.by_site()) < 2 or not is_label_like(counts):
        return
    names = canonical_names({label: sum(item.count for item in places) for label, places in counts.of_split().items()})
    for label, places in counts.of_split().items():
        # A label that looks like another label has its own finding.
        if len(places) == 1 and names[label] == label:
            yield places[0].finding(
                counts.sites,
                kind="label of one site",
                severity="warning",
                message=f"Only the site {counts.sites[places[0].site]!r} has the label {label!r}.",
                cure="Check that all sites use the same labels: a model learns this label from one site.",
                value=label,
            )


def test_only_labels(counts: LabelPlaces) -> Iterator[Finding]:
    """One finding for each label that the test examples have and the training examples lack."""
    labels, trained = counts.of_split(TEST), counts.of_split()
    if counts.is_full or not trained or not is_label_like(counts):
        return
    for label, places in labels.items():
        if label not in trained:
            yield places[0].finding(
                counts.sites,
                kind="label of the test only",
                severity="warning",
                message=f"The test examples have the label {label!r}, which no training example has.",
                cure="Check the spelling of the label, or drop the rows: a model cannot predict the label.",
                value=label,
            )
