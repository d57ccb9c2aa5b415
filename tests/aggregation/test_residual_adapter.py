"""A second adapter has the changes of base weights that are quantized, in half precision or tied."""

from __future__ import annotations

import copy

import pytest
import torch
from lora_federations import (
    LAYERS,
    METHODS,
    TEN,
    build,
    client_part,
    many_layers,
    run_round,
    train,
    trained,
)
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tiny import rows, same_weights, tiny_model

from hf_federated import FedExLoRA
from hf_federated.adapters import Exchange
from hf_federated.adapters.residual import ResidualAdapter, joined_adapter
from hf_federated.aggregation.base_changes import CHANGES, RESIDUAL_ERROR, RESIDUAL_RANK
from hf_federated.clients import Agreement
from hf_federated.clients.request_record import RequestRecord
from hf_federated.engines import LocalEngine
from hf_federated.messages import Fit
from hf_federated.utils.lora_modules import RESIDUAL, find_lora_modules


FOUR = dict(list(TEN.items())[:4])
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def half_model():
    """A model in bfloat16 with adapters in float32, as PEFT builds it."""
    torch.manual_seed(0)
    model = tiny_model(problem_type="single_label_classification").to(torch.bfloat16)
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


@pytest.mark.parametrize("initial", ["pissa", "olora"])
def test_initial_factors_that_change_the_base_weights_are_refused(initial):
    """PEFT would subtract another part of the base weights when it loads the saved adapter of a larger rank."""
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=initial)
    model = get_peft_model(tiny_model(), config)
    with pytest.raises(ValueError, match=f"init_lora_weights='{initial}' subtracts a part of the base weights"):
        ResidualAdapter(model)


def base_of(model):
    return {name: value.clone() for name, value in model.state_dict().items() if "base_layer" in name}


# ---- Factors


def round_of(method, exchange, model, number, num_clients=3):
    clients = {f"client {each}": trained(model, 10 * number + each) for each in range(num_clients)}
    run_round(method, exchange, clients, dict.fromkeys(clients, 1), number)


def layers(method, rank=2):
    model = many_layers(rank, is_tied=True)
    exchange = Exchange(model, with_base=True)
    method.check_model(model, {})
    method.setup(9, 3)
    return model, exchange


def ranks_of(model):
    return {name: len(module.factors(RESIDUAL)[1]) for name, module in find_lora_modules(model).items()}


@pytest.mark.parametrize("limit", [None, 3])
def test_rank_grows_up_to_the_limit(limit):
    method = FedExLoRA(max_residual_rank=limit)
    model, exchange = layers(method)
    # Smaller dimensions of the layers.
    smaller = [
        min(len(left), right[0].numel() if len(right) else right.flatten(1).shape[1])
        for left, right in (module.factors(RESIDUAL) for module in find_lora_modules(model).values())
    ]
    for number in range(4):
        round_of(method, exchange, model, number)
        expected = [min(4 * (number + 1), size, limit or size) for size in smaller]
        assert list(ranks_of(model).values()) == expected
        assert method.residual_logs[RESIDUAL_RANK] == max(expected)


def test_limited_rank_keeps_the_largest_singular_values():
    method, exact = FedExLoRA(max_residual_rank=2), FedExLoRA()
    (model, exchange), (reference, exact_exchange) = layers(method), layers(exact)
    round_of(method, exchange, model, 0)
    round_of(exact, exact_exchange, reference, 0)
    errors = []
    for name in ("wide", "transposed", "embedding"):
        found, ideal = (getattr(each.base_model.model, name).get_delta_weight(RESIDUAL) for each in (model, reference))
        u, s, vh = torch.linalg.svd(ideal, full_matrices=False)
        torch.testing.assert_close(found, (u[:, :2] * s[:2]) @ vh[:2], rtol=0, atol=1e-12)
        errors.append(float(s[2:].norm() / s.norm()))
    assert method.residual_logs[RESIDUAL_ERROR] >= max(errors) - 1e-9 and max(errors) > 0.1
    assert exact.residual_logs[RESIDUAL_ERROR] == 0


def test_saved_adapter_equals_the_concatenation_of_peft():
    """The modules have other ranks, so that the saved configuration has a rank for single modules."""
    method = FedExLoRA()
    model, exchange = layers(method)
    for number in range(2):
        round_of(method, exchange, model, number)
    assert len(set(ranks_of(model).values())) > 1
    model.peft_config[RESIDUAL].r = max(ranks_of(model).values())
    model.peft_config[RESIDUAL].target_modules = set(model.peft_config["default"].target_modules)
    peft = copy.deepcopy(model)
    peft.add_weighted_adapter(["default", RESIDUAL], [1.0, 1.0], "sum", combination_type="cat")
    with joined_adapter(model):
        config, state = copy.deepcopy(model.peft_config["default"]), get_peft_model_state_dict(model)
        assert set(model.peft_config) == {"default"}
    loaded = get_peft_model(many_layers(is_tied=True).unload(), config, autocast_adapter_dtype=False)
    set_peft_model_state_dict(loaded, state)
    for name in LAYERS:
        layer = getattr(peft.base_model.model, name)
        # PEFT keeps rsLoRA, with which the scale of the sum is √r instead of 1.
        expected = layer.get_delta_weight("sum") / layer.scaling["sum"]
        found = getattr(loaded.base_model.model, name).get_delta_weight("default")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_adapter_remains_frozen_when_peft_enables_it_again():
    method = FedExLoRA()
    model, exchange = layers(method)
    round_of(method, exchange, model, 0)
    before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert before and not any(RESIDUAL in name for name in before)
    with model.disable_adapter():
        pass
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == before
    assert all(RESIDUAL in module.layer.active_adapters for module in find_lora_modules(model).values())


def test_frozen_factors_remain_frozen():
    model = many_layers(is_tied=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    exchange = Exchange(model, with_base=True)
    state = {
        name: torch.ones(*value.shape[:1], 1, *value.shape[2:])
        if name.endswith("left")
        else torch.ones(1, *value.shape[1:])
        if name.endswith("right")
        else value
        for name, value in exchange.read().items()
    }
    exchange.write(state)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == before
    assert set(ranks_of(model).values()) == {1}


def test_further_adapters_are_refused():
    model = many_layers(is_tied=True)
    model.add_adapter("reference", LoraConfig(r=2, target_modules=["wide"]))
    with pytest.raises(ValueError, match="the further adapter 'reference'.*Call `delete_adapter`"):
        Exchange(model, with_base=True)


def cut(axis):
    """A function that removes a row or a column of the right factors of a request."""

    def change(state):
        return {
            name: value.narrow(axis, 1, value.shape[axis] - 1) if name.endswith("right") else value
            for name, value in state.items()
        }

    return change


def without_right(state):
    return {name: value for name, value in state.items() if not name.endswith("right")}


@pytest.mark.parametrize("client", ["present", "absent"])
@pytest.mark.parametrize(
    ("limit", "change", "message"),
    [
        (1, lambda state: state, "the rank 2, at most 1 is allowed"),
        (None, cut(0), "split_with_sizes|have the shapes"),
        (None, cut(1), "Sizes of tensors must match|shape .* is invalid|have the shapes"),
        (
            None,
            lambda state: {name: value for name, value in state.items() if not name.endswith("right")},
            "right|of 10",
        ),
    ],
    ids=["rank", "row", "column", "missing"],
)
def test_a_client_refuses_other_factors(client, limit, change, message):
    """A client that trained in the first round receives the second change, and another client all factors."""
    method = FedExLoRA()
    model, exchange = layers(method, rank=1)
    own = Exchange(copy.deepcopy(model), with_base=True)
    memory = {}
    for number in range(2):
        round_of(method, exchange, model, number, num_clients=2)
        if number == 0 and client == "present":
            memory = {"weights": {name: exchange.read()[name] for name in method.base_names}, "version": 1}
    state = method.state_for("client 0" if client == "present" else "absent", exchange.read())
    assert (CHANGES in state) == (client == "present")
    placed = client_part(method, own, model, dict(memory), 2).place(state)
    assert all(torch.equal(placed[name], exchange.read()[name]) for name in method.base_names)
    part = client_part(FedExLoRA(max_residual_rank=limit), own, model, memory, 2)
    with pytest.raises((ValueError, KeyError, RuntimeError), match=message):
        part.place(change(state))


@pytest.mark.parametrize("client", ["present", "absent"])
def test_a_client_on_another_machine_accepts_factors_of_a_higher_rank(client):
    """The client compares shapes with those of its model, whose adapter has the rank of an earlier round."""
    method = FedExLoRA()
    model, exchange = layers(method, rank=1)
    own = Exchange(copy.deepcopy(model), with_base=True)
    for number in range(2):
        round_of(method, exchange, model, number, num_clients=2)
    name = "client 0" if client == "present" else "absent"
    agreement = Agreement([FedExLoRA()], num_rounds=3)
    agreement.record = RequestRecord()
    agreement.check_tensors(Fit(2, name, 0, method.state_for(name, exchange.read())), own)
    largest = own.max_values
    assert largest == own.num_values + sum(
        min(shape) * sum(shape) for shape in [(9, 5), (5, 9), (7, 4), (5, 12), (6, 11)]
    )


# ---- Federations


@pytest.fixture(scope="module", params=METHODS.values(), ids=METHODS)
def run(request, tmp_path_factory):
    """Ten clients, of which two train in a round, on a base model in bfloat16."""
    directory, model = tmp_path_factory.mktemp("half"), half_model()
    base = base_of(model)
    trainer, logits = train(directory, request.param, model=model)
    return trainer, logits, base


def test_all_clients_start_from_the_logits_of_the_server(run):
    trainer, logits, _ = run
    assert len(logits.server) == 6 and all(len(clients) == 2 for clients in logits.clients)
    for server, clients in zip(logits.server, logits.clients, strict=True):
        assert all(torch.equal(client, server) for client in clients)
    assert not torch.equal(logits.server[0], logits.server[-1])
    ranks = [entry[RESIDUAL_RANK] for entry in trainer.state.log_history if RESIDUAL_RANK in entry]
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]


def test_base_weights_are_neither_changed_nor_sent(run):
    trainer, _, base = run
    after = base_of(trainer.model)
    assert base and all(torch.equal(after[name], value) for name, value in base.items())


def wide(model):
    """A copy in float32, in which the values of bfloat16 do not change."""
    return copy.deepcopy(model).float()


def dense_logits(model, logits):
    """The logits of the model whose base weights are the base weights with all changes, in float32."""
    dense = wide(model)
    with torch.no_grad():
        for module in find_lora_modules(dense).values():
            base = module.layer.get_base_layer()
            base.weight += sum(map(module.layer.get_delta_weight, module.layer.active_adapters))
            for name in module.layer.active_adapters:
                module.layer.scaling[name] = 0
    return logits.read(dense)


def test_logits_are_those_of_dense_weights(run):
    trainer, logits, _ = run
    expected = dense_logits(trainer.model, logits)
    torch.testing.assert_close(logits.read(wide(trainer.model)), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits.read(trainer.model).float(), expected, rtol=0, atol=1e-2)


def test_saved_adapter_is_the_global_model(run, tmp_path):
    trainer, logits, _ = run
    model = trainer.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.save_model(tmp_path)
    assert not (tmp_path / RESIDUAL).exists()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    loaded = PeftModel.from_pretrained(half_model().unload(), tmp_path)
    modules = find_lora_modules(model)
    for name, module in find_lora_modules(loaded).items():
        (b, a), (left, right) = modules[name].factors("default"), modules[name].factors(RESIDUAL)
        assert torch.equal(module.factors("default")[0], torch.cat([modules[name].scaling * b, left], 1))
        assert torch.equal(module.factors("default")[1], torch.cat([a, right]))
        assert module.scaling == 1
    expected = logits.read(wide(model))
    torch.testing.assert_close(logits.read(wide(loaded)), expected, rtol=0, atol=1e-6)
    # The adapter alone is another model.
    for module in find_lora_modules(plain := wide(model)).values():
        module.layer.scaling[RESIDUAL] = 0
    assert (logits.read(plain) - expected).abs().max() > 1e-4


@methods
def test_serialized_messages_change_no_byte(tmp_path, method):
    options = {"num_rounds": 3, "clients": FOUR}
    plain, _ = train(tmp_path / "plain", method, model=half_model(), **options)
    serialized, _ = train(
        tmp_path / "serialized", method, model=half_model(), engine=LocalEngine(serialize=True), **options
    )
    assert same_weights(plain.model, serialized.model)


@methods
@pytest.mark.sampled(1)
def test_resumed_run_gives_identical_weights(tmp_path, method):
    whole, _ = train(tmp_path / "whole", method, model=half_model(), num_rounds=4, clients=FOUR)
    args = {"save_strategy": "steps", "save_steps": 2}
    train(tmp_path / "part", method, model=half_model(), num_rounds=4, clients=FOUR, args=args)
    resumed, _ = build(tmp_path / "part", method, model=half_model(), num_rounds=4, clients=FOUR, args=args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-2"))
    assert same_weights(whole.model, resumed.model)


@methods
def test_best_checkpoint_without_the_state_of_the_server_is_refused(tmp_path, method):
    best = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_only_model": True,
    }
    with pytest.raises(ValueError, match="the best one cannot be loaded. Set save_only_model=False"):
        build(tmp_path, method, model=half_model(), args={**best, "save_only_model": True}, eval_dataset=rows(2))
