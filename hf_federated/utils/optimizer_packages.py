"""The packages that the optimizers of `TrainingArguments.optim` need, so that a missing package is found early."""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatchcase

from .optional_packages import require_packages


# For each module: the package to install, and the values of `optim` that import it (`transformers.trainer_optimizer`).
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bitsandbytes": (
        "bitsandbytes",
        ("adamw_bnb_8bit", "adamw_8bit", "ademamix*", "lion_*", "paged_*", "rmsprop_bnb*"),
    ),
    "galore_torch": ("galore-torch", ("galore_*",)),
    "apollo_torch": ("apollo-torch", ("apollo_*",)),
    "lomo_optim": ("lomo-optim", ("lomo", "adalomo")),
    "grokadamw": ("grokadamw", ("grokadamw",)),
    "schedulefree": ("schedulefree", ("schedule_free_*",)),
    "optimi": ("torch-optimi", ("stable_adamw",)),
    "torchao": ("torchao", ("adamw_torch_4bit", "adamw_torch_8bit")),
    "torchdistx": ("torchdistx", ("adamw_anyprecision",)),
    "torch_xla": ("torch-xla", ("adamw_torch_xla",)),
    "torch_npu": ("torch-npu", ("adamw_torch_npu_fused",)),
}
# The extras of `hf-federated` that install a package.
EXTRAS = {"bitsandbytes": "quantization"}


def check_optimizer_package(optim: str) -> None:
    """
    Check that the package of an optimizer is installed, without an import of the package.

    Args:
        optim (`str`): `optim` of the training arguments. An unknown name has no package.

    Raises:
        ImportError: If the package is missing. The message names the package and how to install it.

    Example:

    ```python
    >>> from hf_federated.utils.optimizer_packages import check_optimizer_package

    >>> check_optimizer_package("adamw_torch")
    >>> check_optimizer_package("adamw_anyprecision")
    Traceback (most recent call last):
    ImportError: optim='adamw_anyprecision' needs the package torchdistx, which is not installed. Install with: pip \
install torchdistx. Or set another optimizer, such as optim='adamw_torch'.

    ```
    """
    for module, (package, patterns) in PACKAGES.items():
        if not any(fnmatchcase(optim, pattern) for pattern in patterns):
            continue
        if module in EXTRAS:
            require_packages(f"optim={optim!r}", {EXTRAS[module]: {module: package}})
        elif importlib.util.find_spec(module) is None:
            raise ImportError(
                f"optim={optim!r} needs the package {package}, which is not installed. Install with: pip install "
                f"{package}. Or set another optimizer, such as optim='adamw_torch'."
            )
