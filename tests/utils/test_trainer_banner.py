"""The lines with which `Trainer` announces a training are hidden, and no other lines."""

from __future__ import annotations

import logging
import threading

import transformers
from tiny import arguments, rows, tiny_model
from transformers import Trainer

from hf_federated._compat import TRAINER_LOGGER
from hf_federated.utils.trainer_banner import trainer_banner


def train_and_evaluate(tmp_path, caplog) -> list[str]:
    """Train a plain trainer. Return the messages of its logger."""
    logger = logging.getLogger(TRAINER_LOGGER)
    caplog.clear()
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, TRAINER_LOGGER):
            trainer = Trainer(
                model=tiny_model(), args=arguments(tmp_path), train_dataset=rows(4), eval_dataset=rows(4)
            )
            trainer.train()
            trainer.evaluate()
    finally:
        logger.removeHandler(caplog.handler)
    return [record.getMessage() for record in caplog.records if record.name == TRAINER_LOGGER]


def test_all_lines_that_announce_a_training_are_hidden(tmp_path, caplog):
    """A version of transformers with other words fails this test. Then extend `BANNER_PREFIXES`."""
    assert "***** Running training *****" in train_and_evaluate(tmp_path, caplog)
    with trainer_banner(shown=False):
        assert train_and_evaluate(tmp_path, caplog) == []
    assert "***** Running training *****" in train_and_evaluate(tmp_path, caplog)


def test_other_records_are_shown(caplog):
    logger = transformers.logging.get_logger(TRAINER_LOGGER)
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, TRAINER_LOGGER), trainer_banner(shown=False):
            logger.info("  Num examples = 4")
            logger.info("The following columns have been ignored")
            logger.warning("  Num examples = 4")
            with trainer_banner(shown=True):
                logger.info("  Batch size = 8")
            logger.info({"a": 1})
    finally:
        logger.removeHandler(caplog.handler)
    shown = list(dict.fromkeys((record.levelname, str(record.msg)) for record in caplog.records))
    assert shown == [
        ("INFO", "The following columns have been ignored"),
        ("WARNING", "  Num examples = 4"),
        ("INFO", "  Batch size = 8"),
        ("INFO", "{'a': 1}"),
    ]


def test_training_in_another_thread_announces_itself(caplog):
    logger = transformers.logging.get_logger(TRAINER_LOGGER)
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, TRAINER_LOGGER), trainer_banner(shown=False):
            thread = threading.Thread(target=logger.info, args=("***** Running training *****",))
            thread.start()
            thread.join()
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.msg for record in caplog.records} == {"***** Running training *****"}
