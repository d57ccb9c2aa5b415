"""Number of rows of each label at each site, which the checks of labels share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..column_values import is_categorical
from ..labels import IGNORED, POSITION_PREFIX
from .finding import Place
from .site_table import TRAIN, Batch, SiteTable, is_list, is_string


# With more labels, the labels are no longer counted. The memory does not grow with the number of labels.
MAX_LABELS = 20_000


@dataclass
class LabelPlace(Place):
    """The rows with one label at one site: their number, and the file and line of the first one."""

    label: str = ""


class LabelPlaces:
    """
    Counts the rows of each label at each site of the training and test tables. Tags count by their entity type.

    `places` has the counts by split, label and site. `num_rows` has the number of labels that were read, by split. If
    there are more than `MAX_LABELS` different labels, `is_full` is true and the counts are incomplete. `is_text` and
    `is_quantity` state whether labels are strings and whether they are numbers with a fraction.

    Args:
        column (`str`, *optional*): The column of labels, or of lists of tags.
        sites (`list[str]`): The names of the sites, which grows while batches are read.
    """

    def __init__(self, column: str | None, sites: list[str]) -> None:
        self.column = column
        self.sites = sites
        self.places: dict[tuple[str, str, int], LabelPlace] = {}
        self.num_rows: Counter[str] = Counter()
        self.names: set[str] = set()
        self.is_full = self.is_text = self.is_quantity = self.is_tags = False

    def read(self, batch: Batch) -> None:
        """Count the labels of a batch."""
        values = batch.column(self.column)
        if values is None or self.is_full:
            return
        sites, lines = batch.sites, batch.lines
        if is_list(values.type):
            self.is_tags = True
            rows = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
            sites, lines, values = sites[rows], lines[rows], values.flatten()
        if not (is_categorical(values.type) or pa.types.is_floating(values.type)):
            return
        codes, names = label_codes(values, batch.table.label_names.get(self.column or ""), self.is_tags)
        self.is_text |= is_string(values.type)
        self.is_quantity |= pa.types.is_floating(values.type) and _has_fractions(values)
        self._count(batch.table, sites, lines, codes, names)

    def _count(
        self, table: SiteTable, sites: np.ndarray, lines: np.ndarray, codes: np.ndarray, names: list[str]
    ) -> None:
        valid = codes >= 0
        self.num_rows[table.split] += int(valid.sum())
        self.names.update(names)
        if len(self.names) > MAX_LABELS:
            self.is_full = True
            return
        keys = sites[valid] * len(names) + codes[valid]
        found, first, counts = np.unique(keys, return_index=True, return_counts=True)
        first_lines = lines[valid][first]
        for key, line, count in zip(found.tolist(), first_lines.tolist(), counts.tolist(), strict=True):
            site, code = divmod(key, len(names))
            place = self.places.setdefault(
                (table.split, names[code], site), LabelPlace(site, table, 0, (line,), names[code])
            )
            place.count += count

    def of_split(self, split: str = TRAIN) -> dict[str, list[LabelPlace]]:
        """The places of each label of a split, in the order in which they were read."""
        result: dict[str, list[LabelPlace]] = {}
        for (found, label, _), place in self.places.items():
            if found == split:
                result.setdefault(label, []).append(place)
        return result

    def by_site(self, split: str = TRAIN) -> dict[int, list[LabelPlace]]:
        """The places of each site of a split."""
        result: dict[int, list[LabelPlace]] = {}
        for (found, _, site), place in self.places.items():
            if found == split:
                result.setdefault(site, []).append(place)
        return result


def label_codes(values: pa.Array, names: list[str] | None, is_tags: bool) -> tuple[np.ndarray, list[str]]:
    """
    The position of each label in a list of the labels that occur.

    Args:
        values (`pyarrow.Array`): Strings, numbers, booleans or dates.
        names (`list[str]`, *optional*): The names of labels that are numbers.
        is_tags (`bool`): Whether the labels are tags. Their position prefix is removed, and -100 is missing.

    Returns:
        `tuple[np.ndarray, list[str]]`: For each label its position in the list, or -1 if it is missing, and the list.
    """
    encoded = values.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    shown: list[str | None] = []
    for value in encoded.dictionary.to_pylist():
        if names is not None and isinstance(value, int):
            value = names[value] if 0 <= value < len(names) else None
        elif is_tags and value == IGNORED:
            value = None
        elif isinstance(value, float):
            value = None if value != value else int(value) if value.is_integer() else value
        elif isinstance(value, str) and not value.strip():
            value = None
        text = None if value is None else str(value)
        shown.append(POSITION_PREFIX.sub("", text, count=1) if is_tags and text is not None else text)
    distinct = list(dict.fromkeys(text for text in shown if text is not None))
    number_of = {text: number for number, text in enumerate(distinct)}
    position = np.array([-1 if text is None else number_of[text] for text in shown] + [-1], dtype=np.int64)
    return position[codes], distinct


def _has_fractions(values: pa.Array) -> bool:
    return bool(pc.any(pc.not_equal(pc.floor(values), values)).as_py())
