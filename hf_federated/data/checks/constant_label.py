"""Labels that do not vary: one label in all rows, or in all rows of a site where the other sites have several."""

from __future__ import annotations

from collections.abc import Iterator

from .finding import Finding
from .label_places import LabelPlaces


# A smaller site can have a single label by chance.
MIN_ROWS = 20
# If a larger share of the sites with enough rows have a single label, this is how the sites are.
MAX_SHARE = 0.1


def constant_labels(counts: LabelPlaces) -> Iterator[Finding]:
    """One finding if all rows have the same label, otherwise one for each exceptional site with a single label."""
    labels, by_site = counts.of_split(), counts.by_site()
    if counts.is_full or counts.is_tags or not labels:
        return
    if len(labels) == 1:
        ((label, places),) = labels.items()
        if len(places) > 1 or places[0].count > 1:
            yield places[0].finding(
                counts.sites,
                kind="constant label",
                severity="error",
                message=f"All rows of all sites have the label {label!r} in the column {counts.column!r}.",
                cure="Name another column (--label-column): a model learns nothing from a single label.",
                value=label,
            )
        return
    large = [places for places in by_site.values() if sum(place.count for place in places) >= MIN_ROWS]
    constant = [places[0] for places in large if len(places) == 1]
    if len(constant) > max(1, MAX_SHARE * len(large)):
        return
    for place in constant:
        yield place.finding(
            counts.sites,
            kind="constant label",
            severity="warning",
            message=f"All rows of the site have the label {place.label!r}, and other sites have {len(labels)} labels.",
            cure="Check the export of the site.",
            value=place.label,
        )
