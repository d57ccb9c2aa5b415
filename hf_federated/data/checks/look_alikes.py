"""Names of sites and labels that people read as one name, and that differ in case or whitespace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..client_ids import find_look_alikes
from .finding import Finding, Place
from .label_places import LabelPlaces
from .many_labels import is_label_like


# A label becomes the label that it looks like if it has a smaller share of the rows of both.
MAX_RARE_SHARE = 0.1
FREQUENT_CURE = "Both labels have many rows. If they have one meaning, write all rows with one of them."


def look_alike_sites(places: Mapping[str, Place]) -> Iterator[Finding]:
    """
    One finding for each site whose name looks like the name of a larger site, or has whitespace around it.

    Args:
        places (`Mapping[str, Place]`): The first row and the number of rows of each site by its name.
    """
    sizes = {site: place.count for site, place in places.items()}
    for site, name in canonical_names(sizes).items():
        if site != name:
            yield Finding(
                "look-alike site",
                "warning",
                f"The site {site!r} ({rows_text(sizes[site])}) {_likeness('site', site, name, sizes)}.",
                f"Name the site {name!r} (--fix DIR).",
                site,
                places[site].table.name,
                places[site].lines[:1],
                sizes[site],
                site,
                places[site].table.unit,
            )


def look_alike_labels(counts: LabelPlaces) -> Iterator[Finding]:
    """One finding for each label that differs from a more frequent label in case or whitespace only."""
    if counts.is_full or not counts.is_text or not is_label_like(counts):
        return
    places: dict[str, Place] = {}
    sizes: dict[str, int] = {}
    for (_, label, _), first in counts.places.items():
        places.setdefault(label, first)
        sizes[label] = sizes.get(label, 0) + first.count
    corrected = label_names(sizes)
    for label, name in canonical_names(sizes).items():
        if label != name:
            place = places[label]
            is_corrected = corrected[label] == name
            yield Finding(
                "look-alike label",
                "warning",
                f"The label {label!r} ({rows_text(sizes[label])}) {_likeness('label', label, name, sizes)}.",
                f"Write the label as {name!r} (--fix DIR)." if is_corrected else FREQUENT_CURE,
                counts.sites[place.site],
                place.table.name,
                place.lines[:1],
                sizes[label],
                label,
                place.table.unit,
            )


def _likeness(kind: str, name: str, other: str, sizes: Mapping[str, int]) -> str:
    """How a name differs from the name that it looks like."""
    if other not in sizes:
        return "has whitespace around it"
    if name.casefold() == other.casefold():
        difference = "case"
    elif name.split() == other.split():
        difference = "whitespace"
    else:
        difference = "case, whitespace or invisible characters"
    return f"differs from the {kind} {other!r} in {difference} only"


def rows_text(count: int) -> str:
    """A number of rows with its noun."""
    return f"{count} row{'' if count == 1 else 's'}"


def canonical_names(sizes: Mapping[str, int]) -> dict[str, str]:
    """
    The name to use for each name: without whitespace around it, and the most frequent of the names that look alike.

    Args:
        sizes (`Mapping[str, int]`): Number of rows of each name.

    Example:

    ```python
    >>> from hf_federated.data.checks.look_alikes import canonical_names

    >>> canonical_names({"north": 9, "North ": 1, " south": 2})
    {'north': 'north', 'North ': 'north', ' south': 'south'}

    ```
    """
    names = {name: name.strip() or name for name in sizes}
    for group in find_look_alikes(sizes):
        # Names that differ in whitespace around them count as one name.
        totals: dict[str, int] = {}
        for name in group:
            totals[names[name]] = totals.get(names[name], 0) + sizes[name]
        chosen = max(totals, key=totals.__getitem__)
        names.update(dict.fromkeys(group, chosen))
    return names


def label_names(sizes: Mapping[str, int]) -> dict[str, str]:
    """
    The label to write for each label: without whitespace around it, and a rare label as the label that it looks like.

    Labels that look alike and both have many rows, such as the country `US` and the word `us`, are kept.

    Args:
        sizes (`Mapping[str, int]`): Number of rows of each label.

    Example:

    ```python
    >>> from hf_federated.data.checks.look_alikes import label_names

    >>> label_names({"fine": 20, "Fine": 1, "US": 3, "us": 5, " us": 1})
    {'fine': 'fine', 'Fine': 'fine', 'US': 'US', 'us': 'us', ' us': 'us'}

    ```
    """
    stripped = {name: name.strip() or name for name in sizes}
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        totals[stripped[name]] = totals.get(stripped[name], 0) + size
    names = {}
    for name, other in canonical_names(sizes).items():
        own = stripped[name]
        is_rare = totals[own] < MAX_RARE_SHARE * (totals[own] + totals[other])
        names[name] = other if is_rare else own
    return names
