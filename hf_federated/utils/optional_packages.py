"""Check that optional packages are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping


def require_packages(user: str, extras: Mapping[str, Mapping[str, str]]) -> None:
    """
    Check that all optional packages of a feature are installed.

    Args:
        user (`str`): The feature that needs the packages, for the error message.
        extras (`Mapping[str, Mapping[str, str]]`): Maps each extra of `hf-federated` to its required packages. The
            packages are the names to install, by the name of the module.

    Raises:
        ImportError: If a package is not installed. The message names all missing packages and their extras.

    Example:

    ```python
    >>> from hf_federated.utils.optional_packages import require_packages

    >>> require_packages("audit", {"plots": {"no_plots": "no-plots"}, "metrics": {"no_metrics": "no-metrics"}})
    Traceback (most recent call last):
    ImportError: audit needs no-plots and no-metrics. Install with: pip install 'hf-federated[metrics,plots]'

    ```
    """
    missing = {
        extra: [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
        for extra, packages in extras.items()
    }
    names = [package for packages in missing.values() for package in packages]
    if names:
        listed = ",".join(sorted(extra for extra, packages in missing.items() if packages))
        raise ImportError(f"{user} needs {' and '.join(names)}. Install with: pip install 'hf-federated[{listed}]'")
