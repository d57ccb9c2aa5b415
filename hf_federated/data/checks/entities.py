"""Sites whose examples have no entity, for tagging."""

from __future__ import annotations

from collections.abc import Iterator

from ..labels import OUTSIDE
from .finding import Finding
from .label_places import LabelPlaces


def sites_without_entities(counts: LabelPlaces) -> Iterator[Finding]:
    """One finding for each training site whose tags are all `O`. Tags without the name `O` have no such finding."""
    if not counts.is_tags or OUTSIDE not in counts.names:
        return
    for places in counts.by_site().values():
        if [place.label for place in places] == [OUTSIDE]:
            yield places[0].finding(
                counts.sites,
                kind="no entities",
                severity="warning",
                message=f"No example of the site {counts.sites[places[0].site]!r} has an entity: all tags are 'O'.",
                cure="A model learns from such a client to predict no entity. Check the tags of the site, or partition"
                " with --balance-entities.",
                value=OUTSIDE,
            )
