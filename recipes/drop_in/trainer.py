"""Classify movie reviews as fresh or rotten with `transformers.Trainer`.

python THIS_FILE --model MODEL --data FOLDER --output_dir FOLDER [any TrainingArguments]
"""

from dataclasses import dataclass

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Inputs:
    model: str = "sentence-transformers/all-MiniLM-L6-v2"
    data: str = "outputs/quickstart-inputs/reviews"


inputs, args = HfArgumentParser((Inputs, TrainingArguments)).parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(inputs.model)
model = AutoModelForSequenceClassification.from_pretrained(inputs.model, num_labels=2)

reviews = load_dataset(inputs.data, split="train").class_encode_column("label")
reviews = reviews.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=40), batched=True)
reviews = reviews.train_test_split(test_size=0.1, seed=0)

trainer = Trainer(
    model=model,
    args=args,
    train_dataset=reviews["train"],
    eval_dataset=reviews["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=lambda p: {"accuracy": float(np.mean(p.predictions.argmax(-1) == p.label_ids))},
)
trainer.train()
print(trainer.evaluate())
trainer.save_model()
