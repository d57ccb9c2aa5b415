"""Plot how clients differ when a Dirichlet distribution determines their labels: figure 2 of FedNLP.

python recipes/partition/divergence.py --data SetFit/20_newsgroups --label_column label --output divergence.png
"""

from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import HfArgumentParser

from hf_federated import FederatedDataset, LabelDirichletPartitioner
from hf_federated.data import estimate_alpha, jensen_shannon_divergence, label_counts, plot_divergence


@dataclass
class Arguments:
    data: str = field(metadata={"help": "A dataset of the Hub or a folder."})
    label_column: str = "label"
    num_clients: int = 100
    alphas: list[float] = field(default_factory=lambda: [1.0, 5.0, 10.0, 100.0])
    output: str = "divergence.png"


(arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
dataset = load_dataset(arguments.data, split="train")
matrices = {}
print("| α | mean divergence (bits) | minimum to maximum over pairs | effective α |\n|---|---|---|---|")
for alpha in arguments.alphas:
    partitioner = LabelDirichletPartitioner(arguments.num_clients, arguments.label_column, alpha=alpha)
    counts = label_counts(FederatedDataset.from_dataset(dataset, partitioner), arguments.label_column)
    divergence = jensen_shannon_divergence(counts.shares)
    pairs = divergence[np.triu_indices(arguments.num_clients, k=1)]
    estimate = estimate_alpha(counts.counts)
    print(f"| {alpha:g} | {pairs.mean():.3f} | {pairs.min():.3f} to {pairs.max():.3f} | {estimate:.1f} |")
    matrices[f"α = {alpha:g}"] = divergence
plot_divergence(matrices, arguments.output)
