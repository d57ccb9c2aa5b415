"""Trains one run of a FedDRS recipe and looks at its pseudo-samples: near which words they lie, and a picture.

    python recipes/feddrs/look_at_samples.py --output-dir outputs/feddrs-samples
    python recipes/feddrs/look_at_samples.py --set model.name_or_path=DIR --set federation.num_rounds=3 ...

Prints, for each client, which share of its samples' positions has a word of the client's rows as the nearest one,
beside the same of other clients' samples. `samples.png` shows one client's in the plane of the first two principal
components; `samples.md` has the table and the words that its first samples lie near to, and the model card says what
was found.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hf_federated.audits import PseudoSampleAudit, nearest_tokens, plot_pseudo_samples
from hf_federated.cards.tables import plural, table
from hf_federated.distillation import FedDRS
from hf_federated.distillation.pseudo_samples import token_embeddings
from hf_federated.experiments.execution import build_run
from hf_federated.experiments.recipe import load_recipe


RECIPE = Path(__file__).parent / "table1_encoder.yaml"
SETTINGS = "federation.distillation_kwargs={num_samples: 16, sample_length: 16, server_learning_rate: 1e-4}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="change a field of the recipe")
    parser.add_argument("--output-dir", default="outputs/feddrs-samples", help="gets the model, its card, the picture")
    parser.add_argument("--client", help="whose samples the picture shows; default: the first")
    options = parser.parse_args()
    settings = ["federation.distillation=feddrs", SETTINGS, f"training.output_dir={options.output_dir}"]
    run = build_run(load_recipe(RECIPE, [*settings, *options.settings]))
    trainer, algorithm = run.trainer, run.trainer.distillation
    assert isinstance(algorithm, FedDRS)
    audit = PseudoSampleAudit(algorithm, run.data.train)
    trainer.add_callback(audit)
    trainer.train()
    columns = ["client", "its own", "other clients'", "where they began", "moved to another word"]
    rows = [[name, found.own, found.others, found.start, found.moved] for name, found in audit.results.items()]
    found = table(columns, rows, numeric=True)
    print(found)
    trainer.save_model(options.output_dir)
    trainer.create_model_card(model_name="FedDRS")
    client_id = options.client or next(iter(audit.results))
    if client_id not in audit.results:
        names = ", ".join(audit.results)
        raise SystemExit(f"Client {client_id!r} has no samples of the last round; these have: {names}.")
    weight = token_embeddings(trainer.model).cpu()
    samples, kinds = algorithm.samples[client_id], list(algorithm.sampling)
    known = sorted({token for row in run.data.train[client_id]["input_ids"] for token in row})
    groups = dict(zip(kinds, samples["embeddings"].chunk(len(kinds)), strict=True))
    title = f"client {client_id}: words of its rows, and pseudo-samples"
    plot_pseudo_samples(weight[torch.tensor(known)], groups, Path(options.output_dir) / "samples.png", title)
    tokenizer = trainer.processing_class
    near = [f"{kind}: {tokenizer.decode(nearest_tokens(own[0], weight))}" for kind, own in groups.items()]
    print("\n".join(near))
    report = [
        f"After {plural(trainer.state.global_step, 'round')}, {algorithm.num_steps} steps on {algorithm.num_samples}"
        f" samples of {algorithm.sample_length} positions of each client and kind: the share of positions whose"
        " nearest word is one of the client's rows.",
        found,
        f"Nearest words of client {client_id}'s first samples:",
        *near,
    ]
    (Path(options.output_dir) / "samples.md").write_text("\n\n".join(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
