"""Train one run of a FedDRS recipe and compare its pseudo-samples with the words of the clients' examples.

    python recipes/feddrs/look_at_samples.py --output-dir outputs/feddrs-samples
    python recipes/feddrs/look_at_samples.py --set model.name_or_path=DIR --set federation.num_rounds=3 ...

For each client, the script prints the share of sample positions whose nearest word is in the client's examples, and
the same share for the samples of other clients. `samples.png` shows the samples of one client in the plane of the
first two principal components. `samples.md` contains the table and the nearest words of the client's first samples.
The model card contains the table too.
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
from hf_federated.experiments.recipe.recipe import load_recipe


RECIPE = Path(__file__).parent / "table1_encoder.yaml"
SETTINGS = "federation.distillation_kwargs={num_samples: 16, sample_length: 16, server_lr: 1e-4}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="change a field of the recipe")
    parser.add_argument(
        "--output-dir", default="outputs/feddrs-samples", help="output folder of the model, its card and the figure"
    )
    parser.add_argument("--client", help="client of the figure (default: the first client)")
    options = parser.parse_args()
    settings = ["federation.distillation=feddrs", SETTINGS, f"training.output_dir={options.output_dir}"]
    run = build_run(load_recipe(RECIPE, [*settings, *options.settings]))
    trainer, algorithm = run.trainer, run.trainer.distillation
    assert isinstance(algorithm, FedDRS)
    audit = PseudoSampleAudit(algorithm, run.data.train)
    trainer.add_callback(audit)
    trainer.train()
    columns = ["client", "own samples", "other clients' samples", "start", "moved to another word"]
    rows = [[name, shares.own, shares.others, shares.start, shares.moved] for name, shares in audit.results.items()]
    shares_table = table(columns, rows, numeric=True)
    print(shares_table)
    trainer.save_model(options.output_dir)
    trainer.create_model_card(model_name="FedDRS")
    client_id = options.client or next(iter(audit.results))
    if client_id not in audit.results:
        names = ", ".join(audit.results)
        raise SystemExit(f"Client {client_id!r} has no samples of the last round. Set --client to one of: {names}.")
    weight = token_embeddings(trainer.model).cpu()
    samples, kinds = algorithm.samples[client_id], list(algorithm.sampling)
    client_tokens = sorted({token for row in run.data.train[client_id]["input_ids"] for token in row})
    groups = dict(zip(kinds, samples["embeddings"].chunk(len(kinds)), strict=True))
    title = f"client {client_id}: words of its examples, and pseudo-samples"
    plot_pseudo_samples(weight[torch.tensor(client_tokens)], groups, Path(options.output_dir) / "samples.png", title)
    tokenizer = trainer.processing_class
    nearest = [f"{kind}: {tokenizer.decode(nearest_tokens(group[0], weight))}" for kind, group in groups.items()]
    print("\n".join(nearest))
    report = [
        f"After {plural(trainer.state.global_step, 'round')}, {algorithm.num_steps} steps on {algorithm.num_samples}"
        f" samples of {algorithm.sample_length} positions of each client and kind: the share of positions whose"
        " nearest word is in the client's examples.",
        shares_table,
        f"Nearest words of client {client_id}'s first samples:",
        *nearest,
    ]
    (Path(options.output_dir) / "samples.md").write_text("\n\n".join(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
