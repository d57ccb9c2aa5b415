"""GRPO over three clients whose rewards differ: each client rewards other answers of the shared model.

    python examples/grpo_rewards.py --model HuggingFaceTB/SmolLM2-135M-Instruct --output-dir outputs/grpo-rewards

A reward function runs on the client. All clients have the same function, which reads the column `goal` and the column
`words` of the client's own examples:

- The kitchen wants the words of a recipe in the answer.
- The support desk wants answers of `words` words.
- The school wants the right number.

The script prints the mean reward of each client in each round, and the section of the model card about the federation.
[docs/how-to/trl.md](../docs/how-to/trl.md#rewards-that-differ-by-client) has the output of a run.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from hf_federated import FederatedCallback, FederatedConfig, federate


RECIPES = {
    "pancakes": "flour milk eggs butter",
    "tomato soup": "tomatoes onion garlic salt",
    "rice pudding": "rice milk sugar cinnamon",
    "omelette": "eggs butter cheese salt",
    "fruit salad": "apple banana orange honey",
    "pesto": "basil oil garlic cheese",
    "apple pie": "apples flour sugar butter",
    "bread": "flour water yeast salt",
}
PROBLEMS = (
    "My screen is black.",
    "The printer is out of paper.",
    "I lost my password.",
    "The sound does not work.",
    "My battery is empty.",
    "The page does not load.",
    "The keyboard is wet.",
    "My file is gone.",
)
SUMS = ((2, 3), (4, 4), (7, 1), (5, 6), (9, 2), (3, 8), (6, 6), (1, 4))


def examples_of_clients() -> dict[str, Dataset]:
    """The prompts of each client, with what the client rewards."""
    kitchen = [(f"The ingredients of {dish} are", "words", words) for dish, words in RECIPES.items()]
    support = [(f"Question: {problem}\nShort answer:", "length", "5") for problem in PROBLEMS]
    school = [(f"{a} + {b} =", "number", str(a + b)) for a, b in SUMS]
    clients = {"kitchen": kitchen, "school": school, "support": support}
    return {
        name: Dataset.from_list([{"prompt": prompt, "goal": goal, "words": words} for prompt, goal, words in rows])
        for name, rows in clients.items()
    }


def reward(completions: list[str], goal: list[str], words: list[str], **columns: Any) -> list[float]:
    """Score each completion between 0 and 1 with what its example asks for."""
    scores = {"words": share_of_words, "length": closeness_of_length, "number": has_number}
    rows = zip(completions, goal, words, strict=True)
    return [scores[name](completion.lower().split(), wanted.split()) for completion, name, wanted in rows]


def share_of_words(answer: Sequence[str], wanted: Sequence[str]) -> float:
    found = {word.strip(".,:;") for word in answer}
    return sum(word in found for word in wanted) / len(wanted)


def closeness_of_length(answer: Sequence[str], wanted: Sequence[str]) -> float:
    return max(0.0, 1 - abs(len(answer) - int(wanted[0])) / int(wanted[0]))


def has_number(answer: Sequence[str], wanted: Sequence[str]) -> float:
    return float(any(word.strip(".,:;") == wanted[0] for word in answer))


class Rewards(FederatedCallback):
    """Notes the mean reward of each client in each round."""

    def __init__(self) -> None:
        self.by_client: dict[str, list[float]] = defaultdict(list)

    def on_client_end(self, args: Any, state: Any, control: Any, update: Any, **kwargs: Any) -> None:
        self.by_client[update.client_id].append(update.metrics["reward"])


def build(args: argparse.Namespace, rewards: Rewards) -> Any:
    """Build the federated trainer."""
    return federate(GRPOTrainer)(
        model=args.model,
        reward_funcs=reward,
        args=GRPOConfig(
            str(args.output_dir),
            learning_rate=args.learning_rate,
            beta=0.04,
            num_iterations=2,
            num_generations=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_completion_length=args.max_completion_length,
            logging_steps=1,
            bf16=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=examples_of_clients(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
        callbacks=[rewards],
        federation=FederatedConfig(num_rounds=args.num_rounds, local_steps=args.local_steps),
    )


def print_table(rewards: Rewards) -> None:
    num_rounds = max(map(len, rewards.by_client.values()))
    print("| mean reward | " + " | ".join(f"round {number + 1}" for number in range(num_rounds)) + " |")
    print("|---|" + "---:|" * num_rounds)
    for client_id, values in sorted(rewards.by_client.items()):
        print(f"| {client_id} | " + " | ".join(f"{value:.3f}" for value in values) + " |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="name or folder of the model")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/grpo-rewards"), help="folder of the adapter")
    parser.add_argument("--num-rounds", type=int, default=4, help="number of rounds")
    parser.add_argument("--local-steps", type=int, default=4, help="optimizer steps of a client in a round")
    parser.add_argument("--max-completion-length", type=int, default=16, help="tokens of a completion")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="learning rate of the clients")
    args = parser.parse_args(arguments)
    rewards = Rewards()
    trainer = build(args, rewards)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    print_table(rewards)
    trainer.save_model()
    trainer.create_model_card()
    card = (args.output_dir / "README.md").read_text()
    print(card[card.index("## Federation") : card.index("## Exchanged information")].strip())


if __name__ == "__main__":
    main()
