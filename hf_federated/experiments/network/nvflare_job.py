"""A recipe as a job of NVIDIA FLARE: `hf-federated export-nvflare`, and the parties of the job.

The job contains the recipe and a small file with the classes of the server and of the clients. Each site loads its own
examples, as with `hf-federated serve` and `hf-federated join`.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import inspect
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_federated.engines import NetworkEngine
from hf_federated.engines.nvflare import NVFlareClient, NVFlareServer, output_folder, require_nvflare
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.network.listed_counts import listed_counts
from hf_federated.experiments.network.run import PartyRun, build_client, build_server, party_folder, serve_run
from hf_federated.experiments.recipe.recipe import Recipe, parse_recipe
from hf_federated.experiments.recipe.sections import DEFAULT_OUTPUT_DIR
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.experiments.run_folder import RunFolder


# `nvflare job submit` parses and rewrites all files of a job that end in .yaml.
RECIPE_NAME = "recipe.txt"
# The file that the job ships. NVFlare imports it at all sites under this name.
MODULE_NAME = "hf_federated_job"
MODULE_TEXT = '''"""The server and the clients of recipe.txt. Written by `hf-federated export-nvflare`."""

from hf_federated.experiments.network.nvflare_job import RecipeClient, RecipeServer


class Server(RecipeServer):
    """The server."""


class Client(RecipeClient):
    """A client."""
'''
# In a path of examples, the id of the client takes the place of this text.
CLIENT_FIELD = "{client}"
# Seconds that NVFlare waits at least until all sites have loaded the libraries.
_SYNC_SECONDS = 300.0
_SITE_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NOT_IN_JOB_NAME = re.compile(r"[^A-Za-z0-9._-]+")
# Fields of a recipe that may be paths.
_PATH_FIELDS = {
    "data": ("path", "test_path"),
    "model": ("name_or_path",),
    "public": ("path", "server_path"),
    "client_models": ("name_or_path",),
}


def export_nvflare(
    recipe_path: str, output: str, clients: Sequence[str] = (), overrides: Sequence[str] = (), **options: Any
) -> Path:
    """
    Write a recipe as an NVFlare job.

    Args:
        recipe_path (`str`): YAML file of the recipe.
        output (`str`): Folder of the job. It must not exist.
        clients (`Sequence[str]`, *optional*): Ids of the clients, which are the names of the NVFlare sites. Defaults
            to `network.clients` of the recipe.
        overrides (`Sequence[str]`, *optional*): Changes of the recipe, as `KEY=VALUE`.
        options (`Any`): Further arguments of [`nvflare_recipe`].

    Returns:
        `Path`: The folder of the job.

    Raises:
        CommandError: If NVFlare is not installed, or the recipe cannot be a job.
    """
    folder = Path(output)
    if folder.exists():
        raise CommandError(f"--output: {output} exists. Choose another folder, or delete it.")
    values = read_values(recipe_path, overrides)
    name = _NOT_IN_JOB_NAME.sub("-", Path(recipe_path).stem).strip("-._") or "federation"
    job = nvflare_recipe(values, clients, name=name, **options)
    with tempfile.TemporaryDirectory() as parent:
        job.export(parent)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(str(Path(parent) / name), folder)
    return folder


def nvflare_recipe(
    values: dict[str, Any],
    clients: Sequence[str] = (),
    *,
    name: str = "federation",
    examples: str | None = None,
    test_examples: str | None = None,
    output_dir: str | None = None,
    num_to_start: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Any:
    """
    Build the job of a recipe, for `execute(SimEnv(...))`, `execute(PocEnv(...))`, `execute(ProdEnv(...))` or `export`.

    Args:
        values (`dict[str, Any]`): The recipe, as returned by
            [`~hf_federated.experiments.recipe.yaml_file.read_values`].
        clients (`Sequence[str]`, *optional*): Ids of the clients, which are the names of the NVFlare sites. Defaults
            to `network.clients` of the recipe.
        name (`str`, *optional*, defaults to `"federation"`): Name of the job.
        examples (`str`, *optional*): File, folder or Hub id with the examples of a client at its site. `{client}`
            is replaced by the id of the client. Defaults to the part of the client in the dataset of the recipe.
        test_examples (`str`, *optional*): File, folder or Hub id with the test examples of the server.
        output_dir (`str`, *optional*): Output folder. Overrides `training.output_dir` of the recipe. A relative folder
            is in the workspace of each site.
        num_to_start (`int`, *optional*): Number of clients with which NVFlare starts and continues the job. Overrides
            `network.num_to_start` of the recipe, which defaults to all clients.
        resume (`bool`, *optional*, defaults to `False`): Whether the server continues the run in its output folder.
        overwrite (`bool`, *optional*, defaults to `False`): Whether the server replaces the run in its output folder.

    Returns:
        `nvflare.collab.CollabRecipe`: The job.

    Raises:
        CommandError: If NVFlare is not installed, or the recipe cannot be a job.
    """
    recipe = parse_recipe(values)
    if recipe.split is not None:
        raise CommandError(
            "the recipe has a section split, and NVFlare jobs run averaging and distillation only. Train a split model"
            " over a network with `hf-federated serve` and `hf-federated join`."
        )
    section = recipe.network
    site_names = list(clients or section.clients)
    num_to_start = num_to_start or section.num_to_start or len(site_names)
    _check_sites(site_names, num_to_start)
    _check_examples("--examples", examples)
    _check_examples("--test-examples", test_examples)
    try:
        require_nvflare("export-nvflare")
    except ImportError as error:
        raise CommandError(str(error)) from error
    from nvflare.collab import CollabRecipe
    from nvflare.recipe import set_per_site_config

    module = _shipped_module()
    job = CollabRecipe(
        name,
        server=module.Server(
            site_names,
            num_to_start=num_to_start,
            join_timeout=section.join_timeout,
            rejoin_timeout=section.rejoin_timeout,
            call_timeout=section.heartbeat_timeout,
            output_dir=output_dir,
            test_examples=test_examples,
            resume=resume,
            overwrite=overwrite,
        ),
        client=module.Client(output_dir=output_dir, examples=examples),
        sync_task_timeout=max(_SYNC_SECONDS, section.join_timeout),
        min_clients=num_to_start,
    )
    set_per_site_config(job, {site_name: {} for site_name in site_names})
    if examples is None and (counts := listed_counts(recipe, site_names)):
        values = {**values, "federation": {**(values.get("federation") or {}), **counts}}
    _ship_recipe(job, values, site_names, Path(module.__file__).parent)
    return job


def _ship_recipe(job: Any, values: dict[str, Any], site_names: list[str], folder: Path) -> None:
    """Write the recipe to a subfolder of `folder`, and add it to the files of the server and the clients."""
    path = Path(tempfile.mkdtemp(dir=folder)) / RECIPE_NAME
    network = {**(values.get("network") or {}), "clients": site_names}
    shipped = {name: _absolute(values[name], fields) for name, fields in _PATH_FIELDS.items() if values.get(name)}
    path.write_text(yaml.safe_dump({**values, **shipped, "network": network}, sort_keys=False), encoding="utf-8")
    job.add_server_file(str(path))
    job.add_client_file(str(path))


def _check_sites(site_names: Sequence[str], num_to_start: int) -> None:
    if not site_names:
        raise CommandError("the clients are not known. Pass --client ID for each client, or set network.clients.")
    repeated = [name for name in site_names if site_names.count(name) > 1]
    if repeated:
        raise CommandError(f"client {repeated[0]!r} is listed twice. List each client once.")
    for name in site_names:
        if not _SITE_NAME.fullmatch(name) or name == "server":
            raise CommandError(
                f"client {name!r} cannot be the name of an NVFlare site. Use letters, digits, - and _, and not"
                " 'server'."
            )
    if not 1 <= num_to_start <= len(site_names):
        raise CommandError(
            f"--num-to-start is {num_to_start}, but the job has {len(site_names)} clients. Set it to at least 1 and at"
            f" most {len(site_names)}."
        )


def _check_examples(option: str, path: str | None) -> None:
    if path is None or Path(path).is_absolute():
        return
    if path.startswith(".") or CLIENT_FIELD in path or Path(path).exists():
        raise CommandError(
            f"{option} {path} is a relative path, and a job runs in another folder. Pass an absolute path, such as"
            f" {Path(path).resolve()}."
        )


def _absolute(section: Any, fields: Sequence[str]) -> Any:
    """Make the paths in a section absolute that exist on this machine, because a job runs in another folder."""
    if isinstance(section, list):
        return [_absolute(entry, fields) for entry in section]
    given = {name: section.get(name) for name in fields}
    paths = {name: Path(path) for name, path in given.items() if isinstance(path, str)}
    return {**section, **{name: str(path.resolve()) for name, path in paths.items() if path.exists()}}


@functools.cache
def _shipped_module() -> Any:
    """Write and import the file that jobs ship. NVFlare reads the file when it exports or runs a job."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"{MODULE_NAME}.py"
    path.write_text(MODULE_TEXT, encoding="utf-8")
    spec: Any = importlib.util.spec_from_file_location(MODULE_NAME, path)
    module = sys.modules[MODULE_NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RecipeServer(NVFlareServer):
    """
    The server of a recipe in an NVFlare job. The recipe is next to the file of the class.

    Args:
        clients (`Sequence[str]`): As in [`~hf_federated.engines.nvflare.NVFlareServer`], like the next five arguments.
        num_to_start (`int`, *optional*): See above.
        join_timeout (`float`, *optional*, defaults to `600`): See above.
        rejoin_timeout (`float`, *optional*, defaults to `60`): See above.
        call_timeout (`float`, *optional*, defaults to `60`): See above.
        resume (`bool`, *optional*, defaults to `False`): See above.
        overwrite (`bool`, *optional*, defaults to `False`): Whether the run replaces the run in the output folder.
        output_dir (`str`, *optional*): Overrides `training.output_dir` of the recipe.
        test_examples (`str`, *optional*): File, folder or Hub id with the test examples.
    """

    def __init__(
        self,
        clients: Sequence[str],
        num_to_start: int | None = None,
        join_timeout: float = 600.0,
        rejoin_timeout: float = 60.0,
        call_timeout: float = 60.0,
        resume: bool = False,
        overwrite: bool = False,
        output_dir: str | None = None,
        test_examples: str | None = None,
    ) -> None:
        super().__init__(clients, num_to_start, join_timeout, rejoin_timeout, call_timeout, resume)
        self.overwrite = overwrite
        self.output_dir = output_dir
        self.test_examples = test_examples

    def build_trainer(self, engine: NetworkEngine) -> Any:
        values, recipe = _read_recipe(self)
        output_dir = _output_dir(recipe, self.output_dir)
        self._folder = RunFolder(party_folder(recipe, "server", output_dir), values, self.resume, self.overwrite)
        self._run: PartyRun = build_server(recipe, engine, output_dir, self.test_examples)
        return self._run.trainer

    def run(self, trainer: Any) -> None:
        serve_run(self._run, self._folder)


class RecipeClient(NVFlareClient):
    """
    A client of a recipe in an NVFlare job. The recipe is next to the file of the class.

    Args:
        output_dir (`str`, *optional*): Overrides `training.output_dir` of the recipe.
        examples (`str`, *optional*): File, folder or Hub id with the examples. `{client}` is replaced by the id of
            the client.
    """

    def __init__(self, output_dir: str | None = None, examples: str | None = None) -> None:
        super().__init__()
        self.output_dir = output_dir
        self.examples = examples

    def build_trainer(self, client_id: str) -> Any:
        _, recipe = _read_recipe(self)
        examples = None if self.examples is None else self.examples.replace(CLIENT_FIELD, client_id)
        return build_client(recipe, client_id, _output_dir(recipe, self.output_dir), examples).trainer


def _read_recipe(party: object) -> tuple[dict[str, Any], Recipe]:
    """Read the recipe next to the file of a party."""
    values = read_values(Path(inspect.getfile(type(party))).with_name(RECIPE_NAME))
    return values, parse_recipe(values)


def _output_dir(recipe: Recipe, output_dir: str | None) -> str:
    return output_folder(output_dir or recipe.training.get("output_dir") or DEFAULT_OUTPUT_DIR)
