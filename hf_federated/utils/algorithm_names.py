"""Names of algorithms, collectors, protocols of secure aggregation and codecs, and the classes that they name.

An algorithm has a name in one of three forms:

- a built-in name, such as `fedavg`;
- the name of an entry point of an installed package, in the group `hf_federated.aggregations`,
  `hf_federated.distillations`, `hf_federated.collectors`, `hf_federated.secure_aggregations` or
  `hf_federated.codecs`;
- a reference to a class, `my_package.module:MyClass`.

This module imports no torch, so that a configuration can check names quickly. [`AlgorithmNames.load`] imports a class.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


# `<` and `>` occur in the qualified name of a class that is defined in a function. The name can be saved and compared.
REFERENCE = re.compile(r"[\w.]+:[\w.<>]+")


@dataclass(frozen=True)
class AlgorithmNames:
    """
    The names of one kind of algorithms.

    Args:
        field (`str`): The field of [`FederatedConfig`] that contains the name.
        base (`str`): Name of the base class.
        group (`str`): Group of entry points in which packages publish their classes.
        built_in (`Mapping[str, str]`): References to the built-in classes, by name.

    Example:

    ```python
    >>> from hf_federated.utils.algorithm_names import AGGREGATION_NAMES

    >>> AGGREGATION_NAMES.check("fedporx")
    Traceback (most recent call last):
    ValueError: `aggregation` is 'fedporx'; did you mean 'fedprox'? Allowed are 'fedavg', 'fedprox', ...

    ```
    """

    field: str
    base: str
    group: str
    built_in: Mapping[str, str]

    def check(self, name: Any) -> None:
        """
        Check a name without importing the class.

        The class of a reference can be missing on this machine, for example if a configuration is only read.

        Args:
            name (`Any`): The value of the field. An instance of an algorithm is accepted.

        Raises:
            ValueError: If the name is unknown. The message lists the names and suggests a similar name.
        """
        if isinstance(name, type):
            raise ValueError(
                f"`{self.field}` is the class {name.__name__}. Pass an instance, such as {name.__name__}(), or a name."
            )
        if not isinstance(name, str) or name in self.built_in or REFERENCE.fullmatch(name):
            return
        published = self.entry_points()
        if name in published:
            return
        names = [*self.built_in, *(item for item in published if item not in self.built_in)]
        similar = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"did you mean {similar[0]!r}? Allowed" if similar else "allowed"
        article = "an" if self.base[0] in "AEIOU" else "a"
        raise ValueError(
            f"`{self.field}` is {name!r}; {hint} are {', '.join(map(repr, names))}, a reference to your own "
            f"class ('my_package.module:MyClass'), or an instance of {article} `{self.base}` subclass."
        )

    def load(self, name: str, base: type) -> Any:
        """
        Import the class of a name.

        A built-in name has precedence over an entry point of the same name, with a warning.

        Args:
            name (`str`): The name.
            base (`type`): The base class.

        Returns:
            `type`: A subclass of `base`.

        Raises:
            ValueError: If the name is unknown, the class cannot be imported, or it is not a subclass of `base`.
        """
        self.check(name)
        if name in self.built_in:
            warn_if_published(self.group, self.field, name, self.built_in[name])
            return import_reference(self.built_in[name])
        found = self._import(name, base) if REFERENCE.fullmatch(name) else self._load_entry_point(name)
        if not (isinstance(found, type) and issubclass(found, base)):
            kind = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
            raise ValueError(
                f"`{self.field}` is {name!r}, which is {kind}. It must be a subclass of `hf_federated.{self.base}`."
            )
        return found

    def build(self, algorithm: Any, kwargs: Any, base: Any) -> Any:
        """
        Build the object that a configuration names.

        Args:
            algorithm (`Any`): A name, or an instance of `base`, which is returned unchanged.
            kwargs (`dict`, *optional*): Constructor arguments. Only allowed with a name.
            base (`type`): The base class.

        Raises:
            ValueError: As `load`, if the constructor does not accept an argument, or if `kwargs` are passed together
                with an instance.
        """
        if isinstance(algorithm, base):
            if kwargs:
                raise ValueError(
                    f"`{self.field}_kwargs` is set, but `{self.field}` is an instance. Set `{self.field}` to a name, "
                    "or pass the arguments to the constructor of the instance."
                )
            return algorithm
        cls = self.load(algorithm, base)
        try:
            return cls(**(kwargs or {}))
        except TypeError as error:
            allowed = sorted(inspect.signature(cls).parameters.keys() - set(getattr(cls, "ignores", ())))
            raise ValueError(
                f"Invalid `{self.field}_kwargs` of {algorithm!r}: {error}. Allowed arguments are {allowed}."
            ) from error

    def name_of(self, algorithm: Any) -> str:
        """Return the built-in name of an instance's class, or a reference to the class."""
        cls = type(algorithm)
        reference = f"{cls.__module__}:{cls.__qualname__}"
        return next((name for name, target in self.built_in.items() if target == reference), reference)

    def entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        """The entry points that installed packages publish, by name."""
        return _entry_points(self.group)

    def _load_entry_point(self, name: str) -> Any:
        published = self.entry_points()[name]
        try:
            return published.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"`{self.field}` is {name!r}, which an installed package publishes as {published.value!r}. It cannot "
                f"be imported: {error}. Reinstall the package."
            ) from error

    def _import(self, reference: str, base: type) -> Any:
        """Import the class of a reference that a user wrote."""
        module_name, _, class_name = reference.partition(":")
        given = f"`{self.field}` is {reference!r}"
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ValueError(
                f"{given}, but the module {module_name!r} cannot be imported: {error}. Install the package of the "
                "module, or run from the folder that contains it."
            ) from error
        try:
            return import_reference(reference)
        except AttributeError as error:
            classes = {name: item for name, item in vars(module).items() if isinstance(item, type)}
            own = [name for name, item in classes.items() if issubclass(item, base) and item.__module__ == module_name]
            path = getattr(module, "__file__", None) or "built in"
            known = f"Its `{self.base}` subclasses are {', '.join(own)}." if own else ""
            raise ValueError(
                f"{given}, but the module {module_name!r} ({path}) has no class {class_name!r}. {known}".rstrip()
            ) from error


def _entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    return {item.name: item for item in importlib.metadata.entry_points(group=group)}


@functools.cache
def warn_if_published(group: str, field: str, name: str, built_in: str) -> None:
    """
    Log a warning, once for each name, if an installed package publishes another class under a built-in name.

    Args:
        group (`str`): The group of entry points.
        field (`str`): The field of [`FederatedConfig`] that contains the name.
        name (`str`): The built-in name.
        built_in (`str`): The reference to the built-in class.
    """
    published = _entry_points(group).get(name)
    if published is None or published.value == built_in:
        return
    # Importing transformers takes longer than checking a name.
    from transformers.utils import logging

    logging.get_logger(__name__).warning(
        f"{field}={name!r} is the built-in algorithm. An installed package publishes {published.value} under the same"
        f" name in the group {group}. Set {field}={published.value!r} to use the class of the package."
    )


def import_reference(reference: str) -> Any:
    """Import the object of a reference `module:name`, where the name can contain dots."""
    module_name, _, name = reference.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module_name))


AGGREGATION_NAMES = AlgorithmNames(
    "aggregation",
    "Aggregation",
    "hf_federated.aggregations",
    {
        "fedavg": "hf_federated.aggregation.fedavg:FedAvg",
        "fedprox": "hf_federated.aggregation.fedprox:FedProx",
        "fednova": "hf_federated.aggregation.fednova:FedNova",
        "fedopt": "hf_federated.aggregation.fedopt:FedOpt",
        "fedexp": "hf_federated.aggregation.fedexp:FedExP",
        "scaffold": "hf_federated.aggregation.scaffold:Scaffold",
        "fedper": "hf_federated.aggregation.fedper:FedPer",
        "fedit": "hf_federated.aggregation.fedit:FedIT",
        "ffa_lora": "hf_federated.aggregation.ffa_lora:FFALoRA",
        "rolora": "hf_federated.aggregation.rolora:RoLoRA",
        "fedsvd": "hf_federated.aggregation.fedsvd:FedSVD",
        "stacked_lora": "hf_federated.aggregation.stacked_lora:StackedLora",
        "fedex_lora": "hf_federated.aggregation.fedex_lora:FedExLoRA",
        "local_only": "hf_federated.aggregation.local_only:LocalOnly",
        "mutual_kd": "hf_federated.aggregation.mutual_kd:MutualKD",
        "median": "hf_federated.aggregation.coordinate_median:CoordinateMedian",
        "trimmed_mean": "hf_federated.aggregation.trimmed_mean:TrimmedMean",
        "geometric_median": "hf_federated.aggregation.geometric_median:GeometricMedian",
        "krum": "hf_federated.aggregation.krum:Krum",
        "norm_bounded_mean": "hf_federated.aggregation.norm_bounded_mean:NormBoundedMean",
        "centered_clipping": "hf_federated.aggregation.centered_clipping:CenteredClipping",
        "fltrust": "hf_federated.aggregation.fltrust:FLTrust",
    },
)

DISTILLATION_NAMES = AlgorithmNames(
    "distillation",
    "Distillation",
    "hf_federated.distillations",
    {
        "adafd": "hf_federated.distillation.adafd:AdaFD",
        "cronus": "hf_federated.distillation.cronus:Cronus",
        "dsfl": "hf_federated.distillation.dsfl:DSFL",
        "fedaux": "hf_federated.distillation.fedaux:FedAUX",
        "feddf": "hf_federated.distillation.feddf:FedDF",
        "feddrs": "hf_federated.distillation.feddrs:FedDRS",
        "feded": "hf_federated.distillation.feded:FedED",
        "fedid": "hf_federated.distillation.fedid:FedID",
        "fedkd": "hf_federated.distillation.fedkd:FedKD",
        "fedmd": "hf_federated.distillation.fedmd:FedMD",
        "mhat": "hf_federated.distillation.mhat:MHAT",
    },
)

COLLECTOR_NAMES = AlgorithmNames(
    "collector",
    "UpdateCollector",
    "hf_federated.collectors",
    {
        "synchronous": "hf_federated.server.collectors.synchronous:SynchronousCollector",
        "fedbuff": "hf_federated.server.collectors.fedbuff:BufferedCollector",
    },
)

SECURE_AGGREGATION_NAMES = AlgorithmNames(
    "secure_aggregation",
    "SecureAggregation",
    "hf_federated.secure_aggregations",
    {
        "secagg": "hf_federated.secure_aggregation.secagg:SecAgg",
        "secagg+": "hf_federated.secure_aggregation.secagg_plus:SecAggPlus",
        "lightsecagg": "hf_federated.secure_aggregation.lightsecagg:LightSecAgg",
    },
)

EXCHANGE_CODEC_NAMES = AlgorithmNames(
    "exchange_codec",
    "Codec",
    "hf_federated.codecs",
    {
        "int8": "hf_federated.codecs.scaled_integers:Int8",
        "int4": "hf_federated.codecs.scaled_integers:Int4",
        "topk": "hf_federated.codecs.top_k:TopK",
        "powersgd": "hf_federated.codecs.power_sgd:PowerSGD",
    },
)
