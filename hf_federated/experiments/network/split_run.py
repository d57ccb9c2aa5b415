"""Training of a recipe with a split model on several machines, as the server or as a client.

All parties use the same recipe. The server loads the blocks of the body and no dataset. A client loads its head and
tail and its own dataset. The certificates of `hf-federated certificates` identify the parties.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from peft import PeftConfig, TaskType
from transformers import PretrainedConfig, TrainingArguments

from hf_federated.data.client_ids import similar_ids_hint
from hf_federated.experiments.data.files import hub_errors
from hf_federated.experiments.data.tokenized import load_tokenized_data
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.execution import evaluate_further_splits
from hf_federated.experiments.model_loading import build_adapter, load_tokenizer
from hf_federated.experiments.network.fingerprints import parse_peer
from hf_federated.experiments.recipe.recipe import SINGLE_CLIENT, Recipe, load_recipe
from hf_federated.experiments.recipe.schema import build
from hf_federated.experiments.recipe.sections import ModelSection
from hf_federated.experiments.train_recipe import RESULTS_NAME
from hf_federated.security.certificates import client_certificate, client_fingerprints
from hf_federated.security.encrypted_link import EncryptedLink
from hf_federated.security.encrypted_session import ClientSession, Identity, ServerSession
from hf_federated.security.keys import fingerprint
from hf_federated.security.peer_envelopes import PeerEnvelopes
from hf_federated.split import ModelFingerprint, SplitModel, SplitSessionConfig, Wire
from hf_federated.split.parts import Part
from hf_federated.split_training import ServerModel, SplitConfig, TrainingServer, split_federate
from hf_federated.split_training.config import run_digest, run_settings
from hf_federated.split_training.loading import file_arguments, load_client_model, load_server_body
from hf_federated.tasks import Task
from hf_federated.trainer.checkpoint import size_of_trained
from hf_federated.trainer.output_lock import output_dir_lock
from hf_federated.transport import GrpcLink, GrpcServer, TlsCredentials
from hf_federated.utils.client_names import escape_client_id
from hf_federated.utils.storage import storage_errors


# A client may wait for the turns of all other clients. Heartbeats detect a failed server earlier.
ANSWER_TIMEOUT = 7 * 24 * 3600.0
DEFAULT_ADDRESS = "0.0.0.0:50051"


def split_server(arguments: argparse.Namespace) -> None:
    """
    Execute the command `serve` for a split model: serve a run until it ends.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of the command.

    Raises:
        CommandError: If the recipe, the certificates or the address cannot be used, or the run failed.
    """
    recipe, split, args, adapter = _load_settings(arguments, "server")
    clients = arguments.clients or recipe.network.clients
    if not clients:
        raise CommandError("the clients are not known. Pass --client ID for each client, or set network.clients.")
    folder = str(args.output_dir)
    with command_errors("serve"), storage_errors(folder), output_dir_lock(folder):
        config, body, wire = server_body(recipe, split, adapter, args.seed)
        body.to(args.device)
        digest = run_digest(config, split, args, adapter)
        server_model = ServerModel(body, config, wire, split, args, clients, adapter)
        training_server = TrainingServer(server_model, digest, arguments.deadline)
        terms = _terms(recipe, split, args, adapter, body.cut, wire)
        fingerprints = _fingerprints(arguments, clients) if split.encryption else {}
        with GrpcServer(
            training_server.answer,
            TlsCredentials.of_server(arguments.certificates),
            clients,
            terms,
            address=arguments.address or recipe.network.address or DEFAULT_ADDRESS,
            encryption=_server_sessions(arguments, split, fingerprints),
            on_lost=training_server.client_lost,
            on_left=training_server.client_lost,
            heartbeat_timeout=arguments.heartbeat_timeout or recipe.network.heartbeat_timeout,
            max_message_bytes=arguments.max_message_bytes,
        ) as server:
            print(f"Listening at {server.address} for {', '.join(clients)}.", flush=True)
            failure = training_server.wait()
    if failure is not None:
        raise CommandError(
            f"the run ended at step {training_server.step} of {training_server.server_model.max_steps}: {failure}."
        )
    print(f"Trained {training_server.step} steps. The server's part is in {args.output_dir}.")


def split_client(arguments: argparse.Namespace) -> None:
    """
    Execute the command `join` for a split model: train as one client of a run until it ends.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of the command.

    Raises:
        CommandError: If the recipe, the dataset or the certificates cannot be used, or the run failed.
    """
    client_id = arguments.client
    recipe, split, args, adapter = _load_settings(arguments, escape_client_id(client_id))
    tokenizer = load_tokenizer(recipe.model)
    inputs = load_tokenized_data(_with_local_dataset(recipe, arguments.examples), tokenizer)
    dataset_id = "0" if arguments.examples is not None else client_id
    if dataset_id not in inputs.train:
        raise CommandError(
            f"--client {client_id!r} is not in the recipe. {similar_ids_hint(client_id, list(inputs.train))}"
        )
    address = arguments.address or recipe.network.address
    if address is None:
        raise CommandError("the address of the server is not known. Pass --address, or set network.address.")
    with command_errors("join"), storage_errors(str(args.output_dir)):
        model = client_model(recipe, split, client_id, adapter, args.seed, inputs.task)
        key = client_certificate(arguments.certificates, client_id).with_suffix(".key")
        identity = Identity.from_pem(client_id, key.read_bytes())
        terms = _terms(recipe, split, args, adapter, model.cut, model.boundary.wire)
        credentials = TlsCredentials.of_client(arguments.certificates, client_id)
        with GrpcLink(
            address,
            credentials,
            client_id,
            terms,
            connect_timeout=arguments.connect_timeout,
            answer_timeout=ANSWER_TIMEOUT,
            max_answer_bytes=arguments.max_message_bytes,
        ) as link:
            model.boundary.link = _encrypt_link(arguments, split, identity, link) if split.encryption else link
            trainer_class: Any = inputs.task.trainer_class
            trainer = split_federate(trainer_class)(
                model=model,
                args=args,
                train_dataset=inputs.train[dataset_id],
                eval_dataset=inputs.test,
                split=split,
                envelopes=PeerEnvelopes(identity, _fingerprints(arguments, [])),
                processing_class=tokenizer,
                data_collator=inputs.task.data_collator(tokenizer, model),
                **inputs.metric_arguments,
            )
            trainer.train(resume_from_checkpoint=arguments.resume or None)
            metrics = trainer.evaluate()
            extra_metrics = evaluate_further_splits(trainer, inputs.further_tests)
            trainer.leave()
        with storage_errors(str(args.output_dir), lambda: size_of_trained(model)):
            trainer.save_model()
            trainer.create_model_card(**recipe.card)
            results = _save_results(args, metrics, extra_metrics)
    metric = inputs.task.main_metric
    print(
        f"Trained {trainer.state.global_step} steps, {metric} {results[metric]:.3f}. The client's part and its model "
        f"card (README.md) are in {args.output_dir}."
    )


def _save_results(args: TrainingArguments, metrics: dict[str, float], further: dict[str, Any]) -> dict[str, Any]:
    """Write the metrics of the client to its output folder, and return them without the prefix `eval_`."""
    results: dict[str, Any] = {
        name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")
    }
    if further:
        results["further_tests"] = further
    path = Path(str(args.output_dir)) / RESULTS_NAME
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def _load_settings(
    arguments: argparse.Namespace, party: str
) -> tuple[Recipe, SplitConfig, TrainingArguments, PeftConfig | None]:
    """Load the recipe and the settings that all parties share."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if recipe.split is None:
        raise CommandError(f"{arguments.recipe} has no section split. Train it with `hf-federated train`.")
    split: SplitConfig = build("split", SplitConfig, recipe.split)
    folder = arguments.output_dir or recipe.training.get("output_dir") or "outputs"
    if split.strategy == "serial" and recipe.training.pop("eval_strategy", "no") != "no":
        print("eval_strategy is ignored: with strategy=serial the clients are evaluated at the end of the run.")
    args = recipe.training_arguments(output_dir=str(Path(folder) / party))
    return recipe, split, args, build_adapter(recipe.model, task_type=TaskType.CAUSAL_LM)


def client_model(
    recipe: Recipe, split: SplitConfig, client_id: str, adapter: PeftConfig | None, seed: int, task: Task
) -> SplitModel:
    """Load the head and the tail of the recipe's model for a client."""
    model = load_client_model(
        recipe.model.name_or_path, split, client_id, adapter, seed, **_model_arguments(recipe.model)
    )
    return task.set_up(model)


def server_body(
    recipe: Recipe, split: SplitConfig, adapter: PeftConfig | None, seed: int
) -> tuple[PretrainedConfig, Part, Wire]:
    """Load the body of the recipe's model, the config of the full model, and the encoding of hidden states."""
    name = recipe.model.name_or_path
    with hub_errors("model.name_or_path", name):
        return load_server_body(name, split, adapter, seed, **_model_arguments(recipe.model))


def _model_arguments(model: ModelSection) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` in the section `model`, without the name of the model."""
    kwargs = dict(model.kwargs or {})
    # `torch_dtype` is the deprecated name of `dtype` in transformers.
    deprecated_dtype = kwargs.pop("torch_dtype", None)
    return {**kwargs, "dtype": kwargs.get("dtype") or deprecated_dtype or "auto", "revision": model.revision}


def _with_local_dataset(recipe: Recipe, path: str | None) -> Recipe:
    """Replace the dataset of the recipe by a local dataset, which belongs to a single client."""
    if path is None:
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=path), partition=SINGLE_CLIENT)


def _terms(
    recipe: Recipe, split: SplitConfig, args: TrainingArguments, adapter: PeftConfig | None, cut: Any, wire: Any
) -> SplitSessionConfig:
    files = file_arguments(_model_arguments(recipe.model))
    model = ModelFingerprint.from_checkpoint(recipe.model.name_or_path, **files)
    return SplitSessionConfig(model, cut, wire, adapter, run_settings(split, args))


def _fingerprints(arguments: argparse.Namespace, required: list[str]) -> dict[str, str]:
    """Fingerprints of clients from the `--peer` options and from the certificates in the folder."""
    fingerprints = {
        **client_fingerprints(arguments.certificates),
        **dict(parse_peer(peer) for peer in arguments.peer),
    }
    missing = [client_id for client_id in required if client_id not in fingerprints]
    if missing:
        raise CommandError(
            f"The fingerprint of {missing[0]!r} is missing. Pass --peer {missing[0]}=FINGERPRINT, or add its"
            f" certificate to {arguments.certificates}."
        )
    return fingerprints


def _server_sessions(arguments: argparse.Namespace, split: SplitConfig, fingerprints: dict[str, str]) -> Any:
    if not split.encryption:
        return None
    identity = Identity.from_pem("server", (Path(arguments.certificates) / "server.key").read_bytes())
    return lambda client_id: ServerSession(
        identity, client_id, fingerprints[client_id], rotate_every=split.rotate_keys_every
    )


def _encrypt_link(
    arguments: argparse.Namespace, split: SplitConfig, identity: Identity, link: GrpcLink
) -> EncryptedLink:
    expected = arguments.server_fingerprint
    if expected is None:
        path = Path(arguments.certificates) / "server.pem"
        if not path.is_file():
            raise CommandError(
                "The fingerprint of the server is missing, and split.encryption requires it. Pass"
                f" --server-fingerprint, or add server.pem to {arguments.certificates}."
            )
        expected = fingerprint(path.read_bytes())
    session = ClientSession(identity, "server", expected, rotate_every=split.rotate_keys_every)
    return EncryptedLink(session, link)
