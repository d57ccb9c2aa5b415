"""The report of anomalies: norms are exact, cosines and ranks are close to those of the whole updates."""

from __future__ import annotations

import math

import pytest
import torch
from federations import build_federation
from peft import LoraConfig, get_peft_model
from tiny import rows, same_weights, tiny_model

from hf_federated import AnomalyReport, FederatedCallback
from hf_federated.aggregation.change_sketch import SKETCH_SIZE, ChangeSketch
from hf_federated.reporting.anomaly_plots import plot_anomalies
from hf_federated.server import load_anomalies


CLIENTS = {name: rows(4, seed=number) for number, name in enumerate(("a", "b", "c", "d"))}


class WholeUpdates(FederatedCallback):
    """Keeps whole updates and global states, from which the test computes the values of the report."""

    def __init__(self, product=None):
        self.rounds = []
        self._vector = product or (lambda state: torch.cat([value.double().reshape(-1) for value in state.values()]))

    def on_round_begin(self, args, state, control, round, **kwargs):
        self.rounds.append({"x": self._vector(round.state), "clients": {}})

    def on_client_end(self, args, state, control, update, **kwargs):
        self.rounds[-1]["clients"][update.client_id] = self._vector(update.state) - self.rounds[-1]["x"]

    def on_distill(self, args, state, control, round, **kwargs):
        self.rounds[-1]["global"] = self._vector(round.state) - self.rounds[-1]["x"]


def assert_reports(report, whole):
    assert len(report.rounds) == len(whole.rounds)
    for number, expected in enumerate(whole.rounds):
        found = report.rounds[number]
        assert found["global_norm"] == pytest.approx(float(expected["global"].norm()), rel=1e-6)
        assert list(found["clients"]) == list(expected["clients"])
        for client_id, change in expected["clients"].items():
            values = found["clients"][client_id]
            cosine = torch.nn.functional.cosine_similarity(change, expected["global"], dim=0)
            assert values["norm"] == pytest.approx(float(change.norm()), rel=1e-6)
            assert values["cosine"] == pytest.approx(float(cosine), abs=0.15)
            distance = float((change - expected["global"]).norm())
            assert values["distance"] == pytest.approx(distance, abs=0.3 * float(change.norm()))
        ranks = [values["distance_rank"] for values in found["clients"].values()]
        assert sorted(ranks) == list(range(1, len(ranks) + 1))
        by_rank = sorted(found["clients"].values(), key=lambda values: values["distance_rank"])
        assert [values["distance"] for values in by_rank] == sorted(values["distance"] for values in by_rank)


@pytest.mark.parametrize("aggregation", ["fedavg", "fedopt", "median"])
def test_report_describes_every_update(tmp_path, aggregation):
    report, whole = AnomalyReport(), WholeUpdates()
    trainer = build_federation(
        tmp_path, CLIENTS, federation={"aggregation": aggregation}, trainer={"callbacks": [report, whole]}
    )
    trainer.train()
    assert_reports(report, whole)
    assert load_anomalies(tmp_path) == report.rounds
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for number, entry in enumerate(entries):
        for client_id, values in report.rounds[number]["clients"].items():
            assert entry[f"client/{client_id}/update_norm"] == values["norm"]
            assert entry[f"client/{client_id}/update_cosine"] == values["cosine"]
            assert entry[f"client/{client_id}/distance_rank"] == values["distance_rank"]


def test_report_of_adapters_counts_products_of_factors(tmp_path):
    def product(state):
        pairs = [(name, name.replace("lora_A", "lora_B")) for name in state if "lora_A" in name]
        values = [state[b].double() @ state[a].double() for a, b in pairs]
        values += [value.double() for name, value in state.items() if "lora_" not in name]
        return torch.cat([value.reshape(-1) for value in values])

    report, whole = AnomalyReport(), WholeUpdates(product)
    model = get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    build_federation(
        tmp_path,
        CLIENTS,
        federation={"aggregation": "geometric_median"},
        trainer={"callbacks": [report, whole], "model": model},
    ).train()
    assert_reports(report, whole)


def test_report_does_not_change_the_run(tmp_path):
    with_report = build_federation(tmp_path / "a", CLIENTS, federation={"report_anomalies": True})
    without = build_federation(tmp_path / "b", CLIENTS)
    with_report.train()
    without.train()
    assert same_weights(with_report.model, without.model)
    assert not any("update_norm" in key for entry in without.state.log_history for key in entry)
    assert not (tmp_path / "b" / "federated_anomalies.json").exists()
    assert set(load_anomalies(tmp_path / "a")) == {0, 1}


def test_report_without_log_writes_only_the_file(tmp_path):
    trainer = build_federation(tmp_path, CLIENTS, trainer={"callbacks": [AnomalyReport(log=False)]})
    trainer.train()
    assert not any("update_norm" in key for entry in trainer.state.log_history for key in entry)
    assert len(load_anomalies(tmp_path)) == 2


def test_resumed_run_continues_the_report(tmp_path):
    federation = {"report_anomalies": True}
    build_federation(tmp_path / "whole", CLIENTS, num_rounds=3, federation=federation, save_strategy="epoch").train()
    build_federation(tmp_path / "run", CLIENTS, num_rounds=3, federation=federation, save_strategy="epoch").train()
    resumed = build_federation(tmp_path / "run", CLIENTS, num_rounds=3, federation=federation, save_strategy="epoch")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert load_anomalies(tmp_path / "run") == load_anomalies(tmp_path / "whole")


def test_rejected_clients_are_in_the_report(tmp_path):
    # A client without a readable label fails.
    broken = {**CLIENTS, "e": rows(4, seed=9).map(lambda row: {"labels": 99})}
    report = AnomalyReport()
    build_federation(tmp_path, broken, num_rounds=1, trainer={"callbacks": [report]}).train()
    assert set(report.rounds[0]["rejected"]) == {"e"}
    assert "e" not in report.rounds[0]["clients"]


def test_clients_that_keep_their_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="AnomalyReport does not work with .*: the report compares parameters"):
        build_federation(
            tmp_path,
            CLIENTS,
            federation={"aggregation": "local_only", "report_anomalies": True},
            trainer={"client_model_init": lambda client_id: tiny_model()},
        )


# ---- Sketch


@pytest.mark.slow
def test_error_of_the_cosine_is_within_its_stated_deviation():
    """1021 numbers: a standard deviation of at most 0.044 for any two spread changes."""
    generator = torch.Generator().manual_seed(0)
    before = {"w": torch.zeros(20, 384), **{f"b{number}": torch.zeros(7) for number in range(60)}}

    def draw():
        return {name: torch.randn(value.shape, generator=generator) for name, value in before.items()}

    first, noise = draw(), draw()
    for share in (0.0, 0.5, 1.0, -1.0):
        second = {name: share * first[name] + (1 - abs(share)) * noise[name] for name in before}
        flat = [torch.cat([value.reshape(-1) for value in state.values()]) for state in (first, second)]
        cosine = float(torch.nn.functional.cosine_similarity(*flat, dim=0))
        errors = []
        for seed in range(60):
            sketch = ChangeSketch(before, seed)
            product = float(sketch(first) @ sketch(second))
            errors.append(product / float(flat[0].norm() * flat[1].norm()) - cosine)
        deviation = math.sqrt(sum(error**2 for error in errors) / len(errors))
        assert deviation < 0.055
        assert abs(sum(errors) / len(errors)) < 0.025


def test_change_of_one_row_of_an_embedding_is_exact():
    """All values of a row of 384 have different remainders."""
    before = {"embedding": torch.zeros(50, 384)}
    state = {"embedding": torch.zeros(50, 384)}
    state["embedding"][17] = torch.randn(384)
    sketch = ChangeSketch(before, 0)(state)
    assert sketch.shape == (SKETCH_SIZE,)
    assert float(sketch @ sketch) == pytest.approx(float(state["embedding"].double().square().sum()))


# ---- File and picture


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"rounds": 3}', '{"rounds": {"a": {}}}', '{"rounds": {"0": {"clients": {}}}}']
)
def test_damaged_file_raises_an_error_that_names_it(tmp_path, text):
    (tmp_path / "federated_anomalies.json").write_text(text)
    with pytest.raises(ValueError, match=r"federated_anomalies.json is not a report of anomalies"):
        load_anomalies(tmp_path)


def test_report_is_plotted(tmp_path):
    clients = {f"client {n}": {"norm": 1.0 + n, "cosine": 1 - n / 5, "distance": 1.0} for n in range(9)}
    clients["idle"] = {"norm": 0.0, "cosine": None, "distance": 1.0}
    rounds = {number: {"global_norm": 1.0, "clients": clients, "rejected": {}} for number in range(3)}
    plot_anomalies(rounds, tmp_path / "anomalies.png")
    assert (tmp_path / "anomalies.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no round has an update"):
        plot_anomalies({}, tmp_path / "empty.png")
