"""The page of a run is rewritten after each round, by a field of the configuration or by a callback."""

from __future__ import annotations

import time

import pytest
from federations import build_federation
from tiny import rows

from hf_federated import FederatedCallback, LiveReport
from hf_federated.reporting.run_page import PAGE_NAME


class Pages(FederatedCallback):
    """Keeps the title of the page at the end of each round."""

    def __init__(self, path, before=lambda: None):
        self.path, self.before, self.shown = path, before, []

    def on_round_begin(self, args, state, control, **kwargs):
        self.before()

    def on_round_end(self, args, state, control, **kwargs):
        self.shown.append(self.path.read_text().partition("is over")[0].rpartition("round ")[2])


def test_the_field_writes_a_page_after_each_round(tmp_path):
    page = tmp_path / PAGE_NAME
    # The pause after a page is longer than a round of this test, so the test ends the pause.
    trainer = build_federation(tmp_path, num_rounds=3, federation={"live_report": True})
    pages = Pages(page)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, LiveReport):
            pages.before = lambda callback=callback: setattr(callback, "_next", 0.0)
    trainer.add_callback(pages)
    trainer.train()
    assert pages.shown == ["1 of 3 ", "2 of 3 ", "3 of 3 "]
    assert "complete</title>" in page.read_text()


def test_a_run_without_the_field_writes_no_page(tmp_path):
    build_federation(tmp_path).train()
    assert not (tmp_path / PAGE_NAME).exists()


def test_the_callback_and_the_field_write_one_page(tmp_path):
    report = LiveReport()
    trainer = build_federation(tmp_path, federation={"live_report": True}, trainer={"callbacks": [report]})
    assert sum(isinstance(callback, LiveReport) for callback in trainer.callback_handler.callbacks) == 1
    trainer.train()
    assert report.path == tmp_path / PAGE_NAME
    assert report._repr_html_().startswith("<iframe")


def test_the_page_of_a_failed_run_names_the_error(tmp_path):
    class Fails(FederatedCallback):
        def on_aggregate(self, args, state, control, **kwargs):
            raise RuntimeError("<b>no</b>")

    trainer = build_federation(tmp_path, trainer={"callbacks": [LiveReport(), Fails()]})
    with pytest.raises(RuntimeError):
        trainer.train()
    content = (tmp_path / PAGE_NAME).read_text()
    assert "failed: RuntimeError: &lt;b&gt;no&lt;/b&gt;" in content and "refresh" not in content


def test_short_rounds_do_not_wait_for_the_page(tmp_path, monkeypatch):
    """A page that takes 10 ms is written again after one second, so the pages take at most 1 % of the time."""
    report = LiveReport()
    report.path = tmp_path / PAGE_NAME
    written = []

    def slow(run, path):
        written.append(time.monotonic())
        time.sleep(0.01)

    build_federation(tmp_path).train()
    monkeypatch.setattr("hf_federated.server.live_report.write_run_page", slow)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        report.on_round_end(None, None, None)
    assert len(written) == 1


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / PAGE_NAME).mkdir()
    trainer = build_federation(tmp_path, rows(4), federation={"live_report": True})
    trainer.train()
    assert trainer.state.global_step == 2
    assert "The page of the run cannot be written" in caplog.text
