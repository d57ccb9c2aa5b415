"""FedDRS: the averaged model learns from the clients' models on pseudo-samples that the server generates."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from datasets import Dataset
from distillation_setup import SIZES, Recorder
from feddrs_runs import EMBEDDINGS, SMALL, WeightsRecorder, feddrs_trainer
from peft import LoraConfig, get_peft_model
from test_pseudo_samples import TokensAlone, tiny_llama, tiny_roberta, tiny_t5
from tiny import arguments, rows, same_weights, tiny_model
from transformers import BertConfig

from hf_federated import FedDRS, FederatedCallback, FederatedConfig, FederatedTrainer
from hf_federated.aggregation import WeightedMean
from hf_federated.audits import nearest_tokens
from hf_federated.clients import DiskStore, MemoryStore
from hf_federated.distillation import Teachers
from hf_federated.distillation.pseudo_sampler import PseudoSampler
from hf_federated.messages import CLASS_COUNT, ClientUpdate, Fit
from hf_federated.trainer.workers import Workers


def test_distillation_trains_task_parameters_and_keeps_averaged_embeddings(tmp_path):
    recorder = WeightsRecorder()
    feddrs_trainer(tmp_path, callbacks=[recorder], server_lr=1e-3, post_num_iterations=0).train()
    for averaged, after in zip(recorder.averaged, recorder.distilled, strict=True):
        assert torch.equal(averaged[EMBEDDINGS], after[EMBEDDINGS])
        assert not torch.equal(averaged["classifier.weight"], after["classifier.weight"])
        assert not torch.equal(
            averaged["bert.encoder.layer.0.output.dense.weight"], after["bert.encoder.layer.0.output.dense.weight"]
        )
    # The clients of the next round start from the distilled model and train its embeddings.
    assert not torch.equal(recorder.averaged[1][EMBEDDINGS], recorder.distilled[0][EMBEDDINGS])


def test_distillation_loss_of_a_single_client_is_zero(tmp_path):
    trainer = feddrs_trainer(
        tmp_path, data={"a": rows(8)}, model=tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )
    trainer.train()
    losses = [entry["federated/server_distillation_loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] < 1e-7


@pytest.fixture
def sampling_calls(monkeypatch):
    """Client id and weight of the adversary of each call that generates samples, in order."""
    calls: list[tuple[str, float]] = []
    sample = PseudoSampler.sample

    def recorded(self, client_id, weight, seed):
        calls.append((client_id, weight))
        return sample(self, client_id, weight, seed)

    monkeypatch.setattr(PseudoSampler, "sample", recorded)
    return calls


def test_samples_are_generated_in_each_round_and_finally_for_all_clients(tmp_path, sampling_calls):
    feddrs_trainer(
        tmp_path,
        federation={"num_rounds": 3, "clients_per_round": 2, "federation_seed": 0},
        num_iterations=2,
        post_num_iterations=3,
        post_adversarial_weight=0.5,
    ).train()
    in_rounds, after_rounds = sampling_calls[:12], sampling_calls[12:]
    assert {weight for _, weight in in_rounds} == {0.1}
    assert all(in_rounds[i : i + 2] == in_rounds[i + 2 : i + 4] for i in (0, 4, 8))
    assert after_rounds == [(client_id, 0.5) for client_id in sorted(SIZES)] * 3


def test_post_only_equals_fedavg_until_the_last_round(tmp_path, sampling_calls):
    recorder, plain = WeightsRecorder(), WeightsRecorder()
    feddrs_trainer(tmp_path / "a", callbacks=[recorder], post_only=True, server_lr=1e-3).train()
    FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path / "b"),
        train_dataset={client_id: rows(size, seed=ord(client_id)) for client_id, size in SIZES.items()},
        federation=FederatedConfig(num_rounds=2, aggregation_kwargs={"weighting": "uniform"}),
        callbacks=[plain],
    ).train()
    for name, value in plain.averaged[1].items():
        assert torch.equal(recorder.averaged[1][name], value)
    assert all(torch.equal(value, recorder.distilled[0][name]) for name, value in plain.distilled[0].items())
    assert not torch.equal(recorder.distilled[1]["classifier.weight"], plain.distilled[1]["classifier.weight"])
    assert [client_id for client_id, _ in sampling_calls] == sorted(SIZES) * 3


@pytest.mark.parametrize("clients_per_round", [3, 2])
@pytest.mark.slow
def test_post_only_stores_only_the_teachers_that_it_needs(tmp_path, clients_per_round):
    num_stored, num_seen, seen = [], [], set()

    class CountTeachers(FederatedCallback):
        def on_distill(self, args, state, control, round, **kwargs):
            folder = tmp_path / "teachers"
            num_stored.append(len(list(folder.iterdir())) if folder.exists() else 0)
            seen.update(round.cohort)
            num_seen.append(len(seen))

    federation = {"num_rounds": 3, "clients_per_round": clients_per_round, "federation_seed": 0}
    feddrs_trainer(tmp_path, callbacks=[CountTeachers()], federation=federation, post_only=True).train()
    assert num_stored == ([0, 0, 3] if clients_per_round == 3 else num_seen)


def test_post_processing_starts_from_the_mean_of_the_last_updates_of_all_clients(tmp_path, monkeypatch):
    monkeypatch.setattr(PseudoSampler, "learn", lambda self, samples, seed: 0.0)
    record, sent = Recorder(), {}
    trainer = feddrs_trainer(
        tmp_path,
        federation={"num_rounds": 3, "clients_per_round": 2, "federation_seed": 0},
        callbacks=[record],
    )
    record.trainer = trainer
    trainer.train()
    for reply in record.received:
        if isinstance(reply, ClientUpdate):
            sent[reply.client_id] = reply.state
    assert len(sent) > 2
    weights = trainer.model.state_dict()
    for name in next(iter(sent.values())):
        mean = torch.stack([state[name].double() for state in sent.values()]).mean(0).float()
        torch.testing.assert_close(weights[name], mean)


def test_clients_send_a_label_histogram_with_their_update_and_nothing_else(tmp_path):
    record = Recorder()
    trainer = feddrs_trainer(tmp_path, callbacks=[record])
    record.trainer = trainer
    trainer.train()
    assert {type(message) for message in record.sent} == {Fit}
    for reply in record.received:
        assert not reply.extra
        counts = [reply.metrics[f"{CLASS_COUNT}{label}"] for label in range(2)]
        labels = rows(SIZES[reply.client_id], seed=ord(reply.client_id))["labels"]
        assert counts == [list(labels).count(0), list(labels).count(1)]


@pytest.fixture(scope="module")
def default_model(tmp_path_factory):
    """The model after a run with the default settings."""
    trainer = feddrs_trainer(tmp_path_factory.mktemp("usual"))
    trainer.train()
    return trainer.model


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": "random"},
        {"sampling": "target"},
        {"sampling": ["adversarial", "random"], "adversary": "kl"},
        {"initialization": "client"},
        {"initialization": "gaussian"},
    ],
)
@pytest.mark.sampled(2)
def test_sampling_settings_train_different_models(tmp_path, default_model, settings):
    trainer = feddrs_trainer(tmp_path, **settings)
    trainer.train()
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    assert not same_weights(trainer.model, default_model)


def test_pin_cls_keeps_the_cls_embedding_at_the_start_of_each_sample(tmp_path):
    trainer = feddrs_trainer(tmp_path, pin_cls=True)
    trainer.processing_class = MinimalTokenizer()
    trainer.processing_class.cls_token_id = 3
    trainer.distillation.keeps_samples = True
    trainer.train()
    for samples in trainer.distillation.samples.values():
        weight = trainer.model.get_input_embeddings().weight
        assert torch.equal(samples["embeddings"][:, 0], weight[3].expand(len(samples["embeddings"]), -1))
        assert not torch.equal(samples["embeddings"][:, 1:], samples["starts"][:, 1:])


@pytest.mark.parametrize("build", [tiny_llama, tiny_roberta])
def test_llama_and_roberta_classifiers_train(tmp_path, build):
    model = build()
    trainer = feddrs_trainer(tmp_path, model=model, data={"a": rows(6), "b": rows(4, seed=1)}, args={"use_cpu": True})
    trainer.train()
    assert "federated/server_distillation_loss" in {name for entry in trainer.state.log_history for name in entry}


class MinimalTokenizer:
    """A minimal tokenizer with the members that FedDRS uses."""

    all_special_ids = (0, 1)
    cls_token_id = None
    words = {"yes": [5, 1], "no": [6, 7, 1]}

    def __len__(self):
        return 28  # The embedding has 32 rows.

    def __call__(self, text_target):
        return {"input_ids": [self.words[word] for word in text_target]}


def text_to_text(num_rows, seed=0):
    tokens = torch.randint(2, 30, (num_rows, 6), generator=torch.Generator().manual_seed(seed))
    labels = [
        MinimalTokenizer.words["yes"] + [-100] if row[0] > 15 else MinimalTokenizer.words["no"]
        for row in tokens.tolist()
    ]
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels})


def t5_trainer(tmp_path, callbacks=(), federation=None, sizes=(8, 6), **kwargs):
    """Build a trainer for a small T5. `kwargs` are settings of `FedDRS`."""
    trainer = FederatedTrainer(
        model=tiny_t5(),
        args=arguments(tmp_path),
        train_dataset={name: text_to_text(size, n) for n, (name, size) in enumerate(zip("abc", sizes, strict=False))},
        callbacks=list(callbacks),
        federation=FederatedConfig(
            num_rounds=3,
            distillation=FedDRS(**{"label_texts": ("yes", "no"), **SMALL, **kwargs}),
            aggregation_kwargs={"weighting": "uniform"},
            **(federation or {}),
        ),
    )
    trainer.processing_class = MinimalTokenizer()
    return trainer


@pytest.mark.slow
def test_shared_t5_embeddings_ignore_outdated_updates_of_the_first_round(tmp_path, monkeypatch):
    monkeypatch.setattr(PseudoSampler, "learn", lambda self, samples, seed: 0.0)
    # The cohorts are b and c, then twice a and b. The final mean includes the first update of c.
    recorder, record = WeightsRecorder(), Recorder()
    trainer = t5_trainer(tmp_path, [recorder, record], {"clients_per_round": 2, "federation_seed": 4}, (8, 6, 8))
    record.trainer = trainer
    trainer.train()
    assert [reply.client_id for reply in record.received] == ["b", "c", "a", "b", "a", "b"]
    shared_embeddings = [state["shared.weight"] for state in recorder.distilled]
    assert torch.equal(shared_embeddings[0], shared_embeddings[1]) and torch.equal(
        shared_embeddings[1], shared_embeddings[2]
    )
    # The other parameters are the mean of all clients.
    query = "decoder.block.0.layer.0.SelfAttention.q.weight"
    sent = {reply.client_id: reply.state[query] for reply in record.received}
    mean = (sent["a"] + sent["b"] + sent["c"]) / 3
    torch.testing.assert_close(recorder.distilled[2][query], mean)
    assert ((sent["a"] + sent["b"]) / 2 - mean).abs().max() > 1e-3


def test_shared_t5_embeddings_are_constant_after_the_first_round(tmp_path):
    recorder, record = WeightsRecorder(), Recorder()
    trainer = t5_trainer(tmp_path, [recorder, record], server_lr=1e-3)
    initial = trainer.model.shared.weight.detach().clone()
    record.trainer = trainer
    trainer.train()
    shared_embeddings = [state["shared.weight"] for state in recorder.distilled]
    assert not torch.equal(shared_embeddings[0], initial)
    assert torch.equal(shared_embeddings[0], shared_embeddings[1]) and torch.equal(
        shared_embeddings[1], shared_embeddings[2]
    )
    assert not torch.equal(
        recorder.distilled[1]["decoder.block.0.layer.0.SelfAttention.q.weight"],
        recorder.distilled[2]["decoder.block.0.layer.0.SelfAttention.q.weight"],
    )
    counts = {reply.client_id: [reply.metrics[f"{CLASS_COUNT}{n}"] for n in (0, 1)] for reply in record.received}
    assert sum(counts["a"]) == 8 and sum(counts["b"]) == 6 and min(counts["a"]) > 0


def test_label_outside_label_texts_raises_an_error_that_names_the_row(tmp_path):
    trainer = t5_trainer(tmp_path, label_texts=("yes",))
    with pytest.raises(RuntimeError, match=r"Row \d has a label.*differ from the tokens of all 1 `label_texts`"):
        trainer.train()


@pytest.mark.slow
def test_teachers_of_an_adapter_share_the_base_model(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    teachers = Teachers(model, "adapter", MemoryStore())
    base = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    state = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    teachers.keep(ClientUpdate(0, "a", state, num_examples=1, num_tokens=0, num_steps=1))
    copy = teachers.open("a")
    assert base <= {id(parameter) for parameter in copy.parameters()}
    assert not {id(p) for p in model.parameters() if p.requires_grad} & {id(p) for p in copy.parameters()}
    recorder = WeightsRecorder()
    feddrs_trainer(tmp_path, model=model, callbacks=[recorder], server_lr=1e-2).train()
    before, after = recorder.averaged[0], recorder.distilled[0]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("lora_B" in name for name in moved) and moved <= state.keys()


def test_teachers_are_on_disk_and_removed_after_the_run(tmp_path):
    num_stored = []

    class CountTeachers(FederatedCallback):
        def on_distill(self, args, state, control, **kwargs):
            num_stored.append(len(list((tmp_path / "teachers").iterdir())))

    trainer = feddrs_trainer(tmp_path, callbacks=[CountTeachers()])
    trainer.train()
    assert num_stored == [len(SIZES)] * 2
    teachers = trainer.distillation.server.teachers
    assert isinstance(teachers._store, DiskStore) and teachers._copy is None
    assert not (tmp_path / "teachers").exists()


TENSORS = (torch.Tensor, torch.nn.Parameter)
WIDTH = 24  # The width of one layer. No other tensor of the run has this size.


def most_live_tensors(output_dir, num_clients, monkeypatch):
    """
    The largest number of tensors with the layer's shape while the server uses a client's model.

    Tensors from before the run do not count.
    """
    counts = []

    def count():
        gc.collect()
        counts.append(sum(type(item) in TENSORS and item.shape == (WIDTH, 16) for item in gc.get_objects()))

    def counted(function):
        def call(*args):
            result = function(*args)
            count()
            return result

        return call

    data = {f"client {number}": rows(4, seed=number) for number in range(num_clients)}
    trainer = feddrs_trainer(
        output_dir,
        model=tiny_model(num_hidden_layers=1, intermediate_size=WIDTH),
        data=data,
        federation={"num_rounds": 1},
        post_num_iterations=1,
    )
    gc.collect()
    gc.freeze()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Teachers, "open", counted(Teachers.open))
            patch.setattr(WeightedMean, "add", counted(WeightedMean.add))
            trainer.train()
    finally:
        gc.unfreeze()
    return max(counts)


@pytest.mark.slow
def test_memory_for_teachers_does_not_grow_with_the_number_of_clients(tmp_path, monkeypatch):
    few, many = (most_live_tensors(tmp_path / str(number), number, monkeypatch) for number in (2, 8))
    assert few == many
    # If teachers were in memory, the count would include them.
    monkeypatch.setattr(Workers, "disk_store", lambda self, folder: MemoryStore())
    assert most_live_tensors(tmp_path / "memory", 8, monkeypatch) == many + 8


@pytest.fixture(scope="module")
def t5_with_samples(tmp_path_factory):
    """A trained T5 whose distillation keeps its samples."""
    trainer = t5_trainer(tmp_path_factory.mktemp("samples"))
    trainer.distillation.keeps_samples = True
    trainer.train()
    return trainer


def test_samples_start_from_tokens_of_the_tokenizer(t5_with_samples):
    trainer = t5_with_samples
    for samples in trainer.distillation.samples.values():
        tokens = nearest_tokens(samples["starts"], trainer.model.shared.weight)
        assert torch.equal(trainer.model.shared.weight[tokens], samples["starts"])
        assert 2 <= tokens.min() and 24 < tokens.max() < 28


def test_samples_keep_logits_of_labeled_tokens_only(t5_with_samples):
    trainer = t5_with_samples
    for samples in trainer.distillation.samples.values():
        num_tokens = int((samples["labels"] != -100).sum())
        assert num_tokens < samples["labels"].numel()
        assert samples["logits"].shape == (num_tokens, trainer.model.config.vocab_size)


@pytest.mark.parametrize("clients_per_round", [pytest.param(3, marks=pytest.mark.slow), 2])
@pytest.mark.slow
def test_resume_gives_identical_weights(tmp_path, clients_per_round):
    federation = {"num_rounds": 4, "clients_per_round": clients_per_round, "federation_seed": 0}
    settings = {"federation": federation, "args": {"save_strategy": "steps"}, "server_lr": 1e-3}
    uninterrupted = feddrs_trainer(tmp_path / "a", **settings)
    uninterrupted.train()
    for step in (1, 3):
        resumed = feddrs_trainer(tmp_path / str(step), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
        assert same_weights(uninterrupted.model, resumed.model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": "all"}, "`sampling` is"),
        ({"sampling": []}, "`sampling` is"),
        ({"sampling": ["mixed", "all"]}, "`sampling` is"),
        ({"num_iterations": 0}, "`num_iterations` is 0"),
        ({"post_num_iterations": -1}, "`post_num_iterations` is -1"),
        ({"adversarial_weight": -0.1}, "`adversarial_weight` is -0.1"),
        ({"post_adversarial_weight": float("nan")}, "`post_adversarial_weight` is nan"),
        ({"adversary": "mse"}, "`adversary` is 'mse'"),
        ({"initialization": "zeros"}, "`initialization` is 'zeros'"),
        ({"step_size": 0.0}, "`step_size` is 0.0"),
        ({"step_size": math.inf}, "`step_size` is inf"),
        ({"post_only": True, "post_num_iterations": 0}, "leaves nothing to do"),
        ({"temperature": 2.0}, "`temperature` would have no effect"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        FedDRS(**settings)


def test_public_dataset_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="uses neither public examples nor labeled examples"):
        FederatedTrainer(
            model=tiny_model(),
            args=arguments(tmp_path),
            train_dataset={"a": rows(4)},
            public_dataset=rows(4),
            federation=FederatedConfig(num_rounds=1, distillation="feddrs"),
        )


def test_model_without_inputs_embeds_is_rejected_when_the_trainer_is_built(tmp_path):
    with pytest.raises(ValueError, match="TokensAlone does not accept them"):
        feddrs_trainer(tmp_path, model=TokensAlone(BertConfig()))


def test_label_texts_and_pin_cls_must_fit_the_model(tmp_path):
    with pytest.raises(ValueError, match="is set, but .* is not an encoder–decoder. Leave `label_texts` out"):
        feddrs_trainer(tmp_path, label_texts=["yes", "no"])
    with pytest.raises(ValueError, match="is an encoder–decoder, but `label_texts` is not set. Set `label_texts`"):
        t5_trainer(tmp_path, label_texts=None)
    with pytest.raises(ValueError, match=r"needs a `processing_class` with a \[CLS\] token"):
        feddrs_trainer(tmp_path, pin_cls=True).train()
