"""`hf-federated split-server` and `split-client`: a recipe with a split model, trained by several machines.

Every party reads the same recipe. The server loads the blocks of the body and no rows; a client loads its head and
tail and its own rows. Who is who stands in the certificates of `hf-federated certificates`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PrefixTuningConfig, TaskType
from transformers import PretrainedConfig, TrainingArguments

from hf_federated.data.partitioners import PARTITIONERS
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.inputs import load_inputs, load_tokenizer
from hf_federated.experiments.recipe import Choice, Recipe, build, load_recipe
from hf_federated.experiments.recipe_sections import ModelSection
from hf_federated.experiments.runs import evaluate_further
from hf_federated.security.certificates import client_certificate, client_fingerprints
from hf_federated.security.encryption import ClientSession, Identity, ServerSession
from hf_federated.security.envelope import PeerEnvelopes
from hf_federated.security.keys import check_fingerprint, fingerprint
from hf_federated.security.sealed import SealedLink
from hf_federated.split import ModelFingerprint, SplitModel, Terms, Wire
from hf_federated.split.parts import Part
from hf_federated.split_training import ServerBodies, SplitConfig, TrainingServer, split_federate
from hf_federated.split_training.config import run_digest, run_settings
from hf_federated.split_training.loading import file_arguments, load_client_model, load_server_body
from hf_federated.tasks import Task
from hf_federated.transport import GrpcLink, SplitServer, TlsCredentials
from hf_federated.transport.protocol import DEFAULT_MAX_MESSAGE_BYTES
from hf_federated.utils.client_names import escape_client_id


RESULTS_NAME = "results.json"
# A client may wait for all others' turns; that the server lives is seen from its heartbeats.
ANSWER_TIMEOUT = 7 * 24 * 3600.0


def add_arguments(parser: argparse.ArgumentParser, server: bool) -> None:
    """The commands' options."""
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file, the same for all parties")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="change a field, for example training.learning_rate=5e-4; the value is YAML; may be repeated",
    )
    parser.add_argument("--output-dir", metavar="DIR", help="instead of the recipe's training.output_dir")
    parser.add_argument("--certificates", metavar="DIR", required=True, help="ca.pem, and this party's .pem and .key")
    parser.add_argument(
        "--peer",
        metavar="ID=FINGERPRINT",
        action="append",
        default=[],
        help="a client's fingerprint, where its certificate is not in the folder; may be repeated",
    )
    parser.add_argument(
        "--max-message-bytes",
        type=int,
        metavar="BYTES",
        default=DEFAULT_MAX_MESSAGE_BYTES,
        help="the largest message that is taken from the other side (default: 1 GiB)",
    )
    if server:
        parser.add_argument("--address", default="127.0.0.1:50051", help="where to listen (default: %(default)s)")
        parser.add_argument(
            "--client", metavar="ID", action="append", required=True, help="who takes part, in order; repeated"
        )
        parser.add_argument(
            "--deadline", type=float, metavar="SECONDS", help="for client_batch: how long clients wait for one another"
        )
        parser.add_argument(
            "--heartbeat-timeout", type=float, default=60.0, help="silence after which a client is gone (%(default)s)"
        )
        return
    parser.add_argument("--client", metavar="ID", required=True, help="who this is")
    parser.add_argument("--address", required=True, help="the server's, as its certificate names it: host:port")
    parser.add_argument(
        "--rows",
        metavar="PATH",
        help="this client's own rows, with the recipe's splits; by default the part that the recipe's partition gives",
    )
    parser.add_argument(
        "--server-fingerprint",
        metavar="FINGERPRINT",
        help="with split.encryption, where the server's certificate is not in the folder",
    )
    parser.add_argument(
        "--connect-timeout",
        type=float,
        metavar="SECONDS",
        default=60.0,
        help="how long to try, where the server may start later (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last step of which all have a checkpoint"
    )


def split_server(arguments: argparse.Namespace) -> None:
    """
    Serves a run to its end.

    Raises:
        CommandError: If the recipe, the certificates or the address cannot be used, or the run failed.
    """
    _check_options(arguments)
    recipe, split, args, adapter = _settings(arguments, "server")
    with command_errors("split-server"):
        config, body, wire = server_body(recipe, split, adapter, args.seed)
        body.to(args.device)
        digest = run_digest(config, split, args, adapter)
        bodies = ServerBodies(body, config, wire, split, args, arguments.client, adapter)
        run = TrainingServer(bodies, digest, arguments.deadline)
        terms = _terms(recipe, split, args, adapter, body.cut, wire)
        fingerprints = _fingerprints(arguments, arguments.client) if split.encryption else {}
        with SplitServer(
            run.answer,
            TlsCredentials.of_server(arguments.certificates),
            arguments.client,
            terms,
            address=arguments.address,
            encryption=_server_sessions(arguments, split, fingerprints),
            on_lost=run.client_lost,
            on_left=run.client_lost,
            heartbeat_timeout=arguments.heartbeat_timeout,
            max_message_bytes=arguments.max_message_bytes,
        ) as server:
            print(f"Listening at {server.address} for {', '.join(arguments.client)}.", flush=True)
            failure = run.wait()
    if failure is not None:
        raise CommandError(f"the run ended at step {run.step} of {run.bodies.max_steps}: {failure}.")
    print(f"{run.step} steps. The server's part is in {args.output_dir}.")


def split_client(arguments: argparse.Namespace) -> None:
    """
    Trains as one client of a run to its end.

    Raises:
        CommandError: If the recipe, the rows or the certificates cannot be used, or the run failed.
    """
    _check_options(arguments)
    client_id = arguments.client
    recipe, split, args, adapter = _settings(arguments, escape_client_id(client_id))
    tokenizer = load_tokenizer(recipe.model)
    inputs = load_inputs(_own_rows(recipe, arguments.rows), tokenizer)
    own = "0" if arguments.rows is not None else client_id
    if own not in inputs.train:
        raise CommandError(f"--client {client_id!r}: the recipe's clients are {', '.join(list(inputs.train)[:10])}.")
    with command_errors("split-client"):
        model = client_model(recipe, split, client_id, adapter, args.seed, inputs.task)
        identity = Identity.from_pem(client_id, _key(arguments, client_id))
        terms = _terms(recipe, split, args, adapter, model.cut, model.boundary.wire)
        credentials = TlsCredentials.of_client(arguments.certificates, client_id)
        with GrpcLink(
            arguments.address,
            credentials,
            client_id,
            terms,
            connect_timeout=arguments.connect_timeout,
            answer_timeout=ANSWER_TIMEOUT,
            max_answer_bytes=arguments.max_message_bytes,
        ) as link:
            model.boundary.link = _sealed(arguments, split, identity, link) if split.encryption else link
            trainer_class: Any = inputs.task.trainer_class
            trainer = split_federate(trainer_class)(
                model=model,
                args=args,
                train_dataset=inputs.train[own],
                eval_dataset=inputs.test,
                split=split,
                envelopes=PeerEnvelopes(identity, _fingerprints(arguments, [])),
                processing_class=tokenizer,
                data_collator=inputs.task.data_collator(tokenizer),
                **inputs.metrics,
            )
            trainer.train(resume_from_checkpoint=arguments.resume or None)
            metrics = trainer.evaluate()
            further = evaluate_further(trainer, inputs)
            trainer.leave()
        trainer.save_model()
    trainer.create_model_card(**recipe.card)
    results: dict[str, Any] = {
        name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")
    }
    if further:
        results["further_tests"] = further
    path = Path(str(args.output_dir)) / RESULTS_NAME
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    metric = inputs.task.main_metric
    print(
        f"{trainer.state.global_step} steps, {metric} {results[metric]:.3f}. The part and its card (README.md) are in"
        f" {args.output_dir}."
    )


def _settings(
    arguments: argparse.Namespace, party: str
) -> tuple[Recipe, SplitConfig, TrainingArguments, PeftConfig | None]:
    """The recipe, and what of it all parties share."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if recipe.split is None:
        raise CommandError(f"{arguments.recipe} has no section split; `hf-federated train` trains it.")
    split: SplitConfig = build("split", SplitConfig, recipe.split)
    folder = arguments.output_dir or recipe.training.get("output_dir") or "outputs"
    training = {**recipe.training, "output_dir": str(Path(folder) / party)}
    if recipe.task.writes:
        training["predict_with_generate"] = True
    if split.strategy == "serial" and training.pop("eval_strategy", "no") != "no":
        print("Clients take turns: they are evaluated when the run is over, not before.")
    args: TrainingArguments = build("training", recipe.task.cls.arguments_class, training)
    adapter: PeftConfig | None = None
    kind = TaskType.CAUSAL_LM
    if recipe.model.lora is not None:
        adapter = build("model.lora", LoraConfig, {"task_type": kind, **recipe.model.lora})
    elif recipe.model.prefix is not None:
        adapter = build("model.prefix", PrefixTuningConfig, {"task_type": kind, **recipe.model.prefix})
    return recipe, split, args, adapter


def client_model(
    recipe: Recipe, split: SplitConfig, client_id: str, adapter: PeftConfig | None, seed: int, task: Task
) -> SplitModel:
    """A client's parts of what `train` loads for the recipe."""
    model = load_client_model(
        recipe.model.name_or_path, split, client_id, adapter, seed, **_model_arguments(recipe.model)
    )
    return task.set_up(model)


def server_body(
    recipe: Recipe, split: SplitConfig, adapter: PeftConfig | None, seed: int
) -> tuple[PretrainedConfig, Part, Wire]:
    """The server's part of it, with the whole model's config, and how states travel."""
    return load_server_body(recipe.model.name_or_path, split, adapter, seed, **_model_arguments(recipe.model))


def _model_arguments(model: ModelSection) -> dict[str, Any]:
    """What a recipe says of its model beside the name, as `from_pretrained` takes it."""
    given = dict(model.kwargs or {})
    # transformers' earlier name.
    earlier = given.pop("torch_dtype", None)
    return {**given, "dtype": given.get("dtype") or earlier or "auto", "revision": model.revision}


def _own_rows(recipe: Recipe, rows: str | None) -> Recipe:
    """The recipe with one client, which has all rows of a path."""
    if rows is None:
        return recipe
    alone = Choice("iid", PARTITIONERS["iid"], {"num_clients": 1})
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=rows), partition=alone)


def _terms(
    recipe: Recipe, split: SplitConfig, args: TrainingArguments, adapter: PeftConfig | None, cut: Any, wire: Any
) -> Terms:
    files = file_arguments(_model_arguments(recipe.model))
    model = ModelFingerprint.from_checkpoint(recipe.model.name_or_path, **files)
    return Terms(model, cut, wire, adapter, run_settings(split, args))


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse, before anything is loaded, what no run could use."""
    if not Path(arguments.certificates).is_dir():
        raise CommandError(f"--certificates: there is no folder {arguments.certificates}.")
    for name in ("max_message_bytes", "deadline", "heartbeat_timeout", "connect_timeout"):
        value = getattr(arguments, name, None)
        if value is not None and not value > 0:
            raise CommandError(f"--{name.replace('_', '-')} is more than 0, got {value}.")
    for given in arguments.peer:
        _peer(given)
    expected = getattr(arguments, "server_fingerprint", None)
    if expected is not None:
        with command_errors("--server-fingerprint"):
            check_fingerprint(expected, "server")


def _peer(given: str) -> tuple[str, str]:
    """A client's id and fingerprint."""
    client_id, equals, value = given.rpartition("=")
    if not equals or not client_id:
        raise CommandError(f"--peer {given!r} is not of the form ID=FINGERPRINT.")
    with command_errors(f"--peer {given}"):
        check_fingerprint(value, client_id)
    return client_id, value


def _key(arguments: argparse.Namespace, client_id: str) -> bytes:
    return client_certificate(arguments.certificates, client_id).with_suffix(".key").read_bytes()


def _fingerprints(arguments: argparse.Namespace, needed: list[str]) -> dict[str, str]:
    """Clients' fingerprints: those that are given, and of certificates that are here."""
    found = {**client_fingerprints(arguments.certificates), **dict(_peer(given) for given in arguments.peer)}
    missing = [client_id for client_id in needed if client_id not in found]
    if missing:
        raise CommandError(f"--peer: no fingerprint of {missing[0]!r} was given, and its certificate is not here.")
    return found


def _server_sessions(arguments: argparse.Namespace, split: SplitConfig, fingerprints: dict[str, str]) -> Any:
    if not split.encryption:
        return None
    key = (Path(arguments.certificates) / "server.key").read_bytes()
    identity = Identity.from_pem("server", key)
    return lambda client_id: ServerSession(
        identity, client_id, fingerprints[client_id], rotate_every=split.rotate_keys_every
    )


def _sealed(arguments: argparse.Namespace, split: SplitConfig, identity: Identity, link: GrpcLink) -> SealedLink:
    expected = arguments.server_fingerprint
    if expected is None:
        path = Path(arguments.certificates) / "server.pem"
        if not path.is_file():
            raise CommandError("--server-fingerprint: with split.encryption a client must know the server's.")
        expected = fingerprint(path.read_bytes())
    session = ClientSession(identity, "server", expected, rotate_every=split.rotate_keys_every)
    return SealedLink(session, link)
