"""`check_datasets`: the findings in datasets, for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .cut_texts import model_limit
from .doctor import Limit, examine
from .finding import Finding
from .site_table import TEST, TRAIN, find_columns
from .sources import dataset_tables


if TYPE_CHECKING:
    from datasets import Dataset

    from ..federated_dataset import FederatedDataset


def check_datasets(
    datasets: Dataset | FederatedDataset | Mapping[str, Dataset],
    test: Dataset | FederatedDataset | Mapping[str, Dataset] | None = None,
    text_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    site_column: str | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
) -> list[Finding]:
    """
    Find what is wrong in examples before a model trains on them.

    The rows are read once, in batches. The findings are those of `hf-federated check`: missing texts and labels,
    duplicates within a site, between sites and between training and test, names of sites and labels that look alike,
    labels of a single site, label columns with as many values as rows or with one value, columns that differ between
    sites, sites without rows or without entities, numbers that are stored as text, and texts that the model cuts.

    Args:
        datasets (`datasets.Dataset`, [`FederatedDataset`] or `Mapping[str, datasets.Dataset]`):
            The training examples, by site or with a column of sites.
        test (`datasets.Dataset`, [`FederatedDataset`] or `Mapping[str, datasets.Dataset]`, *optional*):
            The test examples.
        text_column (`str` or `Sequence[str]`, *optional*):
            The columns of texts, or of lists of words. Defaults to a column with a usual name, such as `"text"`.
        label_column (`str`, *optional*):
            The column of labels, or of lists of tags. Defaults to a column with a usual name, such as `"label"`.
        site_column (`str`, *optional*):
            The column with the site of each row, for a single `datasets.Dataset`.
        tokenizer (`PreTrainedTokenizerFast`, *optional*):
            The tokenizer of the model. Without it, texts that the model cuts are not found.
        max_length (`int`, *optional*):
            Number of tokens that the model reads. Defaults to the maximum of the tokenizer.

    Returns:
        `list[Finding]`: The findings, with errors first. Rows have numbers from 1.

    Raises:
        ValueError: If a column does not exist.
        TypeError: If an argument is not a dataset.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data import check_datasets

    >>> sites = {
    ...     "north": Dataset.from_dict({"text": ["it leaks", None, "it works"], "label": ["bad", "bad", "good"]}),
    ...     "South": Dataset.from_dict({"text": ["it works", "it leaks"], "label": ["good", "bad"]}),
    ... }
    >>> for finding in check_datasets(sites):
    ...     print(finding.severity, finding.kind, finding.place, sep=", ")
    error, missing text, site 'north', row 2
    warning, duplicate between sites, site 'South', rows 1, 2

    ```
    """
    tables = dataset_tables(datasets, TRAIN, None if site_column is not None else "")
    if test is not None:
        has_column = site_column is not None and site_column in getattr(test, "column_names", ())
        tables += dataset_tables(test, TEST, None if has_column else "")
    texts = [text_column] if isinstance(text_column, str) else text_column
    columns = find_columns(tables, texts, label_column, site_column)
    limit = None
    if tokenizer is not None:
        length = max_length or model_limit(tokenizer, {})
        limit = None if length is None else Limit(tokenizer, length)
    return examine(tables, columns, limit).findings
