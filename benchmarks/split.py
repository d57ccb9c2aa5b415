"""Cost of splitting a language model, in one process: compared with the unsplit model, and for several clients.

    python benchmarks/split.py                                    # size of SmolLM2-135M, LoRA
    python benchmarks/split.py --hidden-size 64 --num-heads 4 --num-blocks 6 --vocabulary 1000 --num-clients 2 4
    python benchmarks/split.py --device cuda --dtype bfloat16 --wire-dtype bfloat16

A step is a forward pass, a backward pass and an AdamW update of the adapters. All parties take turns in this process,
and the ratios are ratios of medians.

- `split` is a step of `"serial"`.
- `sealed` is the same step with encrypted messages.
- `meeting` is a step of `"client_batch"`: the body processes the examples of all clients as one batch.
- `replicas` is a step of `"server_hierarchical"`: each client uses its own replica of the body. The replicas would run
  on separate machines. Here they take turns.

The throughput of `meeting` and `replicas` is compared with the same clients one after the other. The bytes are the
sizes of all messages of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_federated import SplitModel
from hf_federated.security.encrypted_link import EncryptedLink, EncryptedServer
from hf_federated.security.encrypted_session import ClientSession, Identity, ServerSession
from hf_federated.split import ClientBatchRunner, LocalLink


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    """Build the unsplit model with its adapters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
        num_hidden_layers=options.num_blocks,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_heads // 3 or 1,
        tie_word_embeddings=True,
    )
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear", init_lora_weights=False)
    model = LlamaForCausalLM(config).to(options.device, getattr(torch, options.dtype))
    return get_peft_model(model, lora)


def split_model(options: argparse.Namespace, **kwargs: str) -> SplitModel:
    """Build the same model in three parts."""
    return SplitModel.from_model(build(options), wire_dtype=options.wire_dtype, **kwargs)


def batch(options: argparse.Namespace, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(options.vocabulary, (options.batch_size, options.length), generator=generator)
    ids = ids.to(options.device)
    return {"input_ids": ids, "labels": ids}


def stepper(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Step of one model on one batch."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def encrypted_stepper(options: argparse.Namespace) -> Callable[[], None]:
    """Step of a split model with encrypted messages."""
    split = split_model(options, client_id="client")
    client_identity, server_identity = Identity.generate("client"), Identity.generate("server")
    server_session = ServerSession(server_identity, "client", client_identity.fingerprint, rotate_every=None)
    client_session = ClientSession(client_identity, "server", server_identity.fingerprint, rotate_every=None)
    split.boundary.link = EncryptedLink(
        client_session, EncryptedServer(server_session, split.boundary.link.server.answer)
    )
    return stepper(split, batch(options, 0))


def replicas_stepper(options: argparse.Namespace, num_clients: int) -> Callable[[], None]:
    """Step of several clients, each with its own replica of the body."""
    steps = [stepper(split_model(options), batch(options, seed)) for seed in range(num_clients)]

    def step() -> None:
        for step_of_client in steps:
            step_of_client()

    return step


def client_batch_stepper(options: argparse.Namespace, num_clients: int) -> Callable[[], None]:
    """Step of a server that batches several clients, which have their own heads and tails."""
    clients = {str(number): split_model(options, client_id=str(number)) for number in range(num_clients)}
    server = clients["0"].boundary.link.server
    client_batch = ClientBatchRunner(server)
    inputs = {name: batch(options, int(name)) for name in clients}
    for name, client in clients.items():
        if name != "0":
            client.server_body = None
        client.boundary.link = client_batch.link(name)
        client.boundary.defers_backward = True
    # The model of the first client has the body that all clients share.
    trained = [p for client in clients.values() for p in client.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def work(name: str) -> None:
        clients[name].boundary.begin_step(0, total_targets=options.batch_size * (options.length - 1))
        clients[name](**inputs[name]).loss.backward()
        clients[name].boundary.finish_backward()

    def step() -> None:
        client_batch.run({name: lambda name=name: work(name) for name in clients})
        server.average_gradients()
        optimizer.step()
        optimizer.zero_grad()

    return step


def num_bytes_of_step(options: argparse.Namespace, split: SplitModel) -> tuple[int, int]:
    """Number of bytes of all messages of a step, and the number that the formula without headers gives."""
    sizes: list[int] = []
    link = split.boundary.link
    split.boundary.link = LocalLink(link.server, lambda *blobs: sizes.extend(map(len, blobs)))
    split(**batch(options, 0)).loss.backward()
    split.boundary.link = link
    wire = split.boundary.wire
    size = (options.batch_size, options.length, options.hidden_size)
    return sum(sizes), 2 * sum(wire.num_bytes({name: size}) for name in ("hidden", "gradient"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--num-blocks", type=int, default=30)
    parser.add_argument("--num-heads", type=int, default=9)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-clients", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for all parties")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--wire-dtype", default="auto", help="auto (dtype of the model), or a dtype of Wire")
    parser.add_argument("--output", help="JSON file for the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    whole, split = build(options), split_model(options)
    steps = {"unsplit": stepper(whole, batch(options, 0)), "split": stepper(split, batch(options, 0))}
    steps["sealed"] = encrypted_stepper(options)
    steps |= {f"replicas of {number}": replicas_stepper(options, number) for number in options.num_clients[:1]}
    steps |= {f"meeting of {number}": client_batch_stepper(options, number) for number in options.num_clients}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + options.repetitions):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if options.device != "cpu":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    # Skip the first step of each variant, which creates the state of the optimizer and fills caches.
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    print(f"split / unsplit: {medians['split'] / medians['unsplit']:.3f}  ({medians['split']:.3f} s a step)")
    print(f"sealed / split: {medians['sealed'] / medians['split']:.3f}")
    for number in options.num_clients[:1]:
        ratio = number * medians["split"] / medians[f"replicas of {number}"]
        print(f"examples per second, {number} clients with replicas / one after the other: {ratio:.2f}")
    for number in options.num_clients:
        ratio = number * medians["split"] / medians[f"meeting of {number}"]
        print(f"examples per second, {number} clients in one batch / one after the other: {ratio:.2f}")
    num_bytes, formula = num_bytes_of_step(options, split)
    print(f"bytes of a step / formula without headers: {num_bytes / formula:.4f}  ({num_bytes} / {formula})")
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump({"medians": medians, "seconds": seconds, "bytes": num_bytes, "formula": formula}, file, indent=2)


if __name__ == "__main__":
    main()
