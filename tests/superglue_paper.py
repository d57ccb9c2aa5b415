"""
The raw row of each SuperGLUE task in appendix A.2 of FedDRS, with the processed inputs and targets of the appendix.

Long texts are shortened. Labels match the targets, because the label numbers in the appendix contradict the
benchmark.
"""

from __future__ import annotations

from typing import Any


QUERY = (
    "The baby she gave birth to is her husbands and he has even offered to have the courts set her free if she returns"
)

# By task: the raw row, and the text and target of each input that it becomes.
PRINTED: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {}

PRINTED["boolq"] = (
    {
        "question": "science begins with the premise that knowledge should first be acquired through observation",
        "passage": "A priori and a posteriori – These terms are used with respect to reasoning (epistemology) to "
        'distinguish "necessary conclusions from first premises" (i.e., what must come before sense observation)',
        "label": True,
    },
    [
        (
            "boolq question: science begins with the premise that knowledge should first be acquired through "
            "observation. passage: A priori and a posteriori These terms are used with respect to reasoning "
            "epistemology to distinguish necessary conclusions from first premises ie what must come before sense "
            "observation",
            "Yes",
        )
    ],
)

PRINTED["wic"] = (
    {
        "word": "place",
        "sentence1": "Do you want to come over to my place later?",
        "sentence2": "A political system with no place for the less prominent groups.",
        "label": False,
    },
    [
        (
            "wic word: place. sentence1: Do you want to come over to my place later. "
            "sentence2: A political system with no place for the less prominent groups",
            "Mismatch",
        )
    ],
)

PRINTED["wsc"] = (
    {
        "text": "Mark told Pete many lies about himself, which Pete included in his book. "
        "He should have been more skeptical.",
        "target": {"span1_text": "Mark", "span1_index": 0, "span2_text": "He", "span2_index": 13},
        "label": False,
    },
    [
        (
            "wsc: Mark told Pete many lies about himself which Pete included in his book "
            "* He * should have been more skeptical",
            "Difference",
        )
    ],
)

PRINTED["cb"] = (
    {
        "premise": "It was a complex language. Not written down but handed down. One might say it was peeled down.",
        "hypothesis": "the language was peeled down",
        "label": "entailment",
    },
    [
        (
            "cb hypothesis: the language was peeled down. premise: It was a complex language Not written down but "
            "handed down One might say it was peeled down",
            "Entailment",
        )
    ],
)

PRINTED["rte"] = (
    {
        "premise": "No Weapons of Mass Destruction Found in Iraq Yet.",
        "hypothesis": "Weapons of Mass Destruction Found in Iraq.",
        "label": "not_entailment",
    },
    [
        (
            "rte hypothesis: Weapons of Mass Destruction Found in Iraq. "
            "premise: No Weapons of Mass Destruction Found in Iraq Yet",
            "Not_entailment",
        )
    ],
)

PRINTED["record"] = (
    {
        # The paper omits the part of the text with the three names.
        "passage": "The harrowing stories of women and children locked up for so-called 'moral crimes' in "
        "Afghanistan's notorious female prison have been revealed (Mariam, Badam Bagh, Nuria)",
        "query": f"{QUERY}, but @placeholder has refused",
        "entities": ["Mariam", "Badam Bagh", "Nuria", "Afghanistan"],
        "answers": ["Nuria"],
        "idx": {"passage": 0, "query": 0},
    },
    [
        (
            f"record answer: {name}. query: {QUERY} but @placeholder has refused. passage: The harrowing stories of "
            "women and children locked up for socalled moral crimes in Afghanistans notorious female prison have been "
            "revealed Mariam Badam Bagh Nuria",
            target,
        )
        for name, target in (
            ("Mariam", "Wrong"),
            ("Badam Bagh", "Wrong"),
            ("Nuria", "Correct"),
            ("Afghanistan", "Wrong"),
        )
    ],
)

PRINTED["copa"] = (
    {
        "premise": "My body cast a shadow over the grass.",
        "choice1": "The sun was rising.",
        "choice2": "The grass was cut.",
        "question": "cause",
        "label": 0,
    },
    [
        (
            "copa choice1: The sun was rising. choice2: The grass was cut. "
            "premise: My body cast a shadow over the grass. question: cause",
            "Choice_one",
        )
    ],
)

PRINTED["multirc"] = (
    {
        "paragraph": "While this process moved along, diplomacy continued its rounds. The U.S. effort continued.",
        "question": "What did the high-level effort to persuade Pakistan include?",
        "answer": "Children, Gerd, or Dorian Popa",
        "idx": {"paragraph": 0, "question": 0, "answer": 0},
        "label": 0,
    },
    [
        (
            "multirc question: What did the highlevel effort to persuade Pakistan include? answer: Children Gerd or "
            "Dorian Popa. paragraph: While this process moved along diplomacy continued its rounds The US effort "
            "continued",
            "False",
        )
    ],
)
