"""Parties of a split model load the class of their parts from the code in the repository of the model."""

from __future__ import annotations

import pytest
import torch
from chatglm_repository import write_repository
from peft import PrefixTuningConfig

from hf_federated import SplitConfig, SplitModel
from hf_federated.split import BodyServer, LocalLink
from hf_federated.split_training.loading import load_client_model, load_server_body
from hf_federated.utils.remote_code import load_causal_model


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("num_virtual_tokens", [0, 3])
def test_parts_of_client_and_server_compute_what_the_whole_model_computes(generation, num_virtual_tokens, tmp_path):
    adapter = None
    if num_virtual_tokens:
        adapter = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_virtual_tokens)
    name = str(write_repository(tmp_path, generation, ["a warm film in Paris", "yes no Rome"] * 8))
    settings = {"trust_remote_code": True, "adapter": adapter}
    client = load_client_model(name, SplitConfig(), "north", **settings)
    _, body, wire = load_server_body(name, SplitConfig(), **settings)
    client.boundary.link = LocalLink(BodyServer(body, wire))
    whole = load_causal_model(name, trust_remote_code=True).eval()
    expected: torch.nn.Module = whole
    if adapter is not None:
        expected = SplitModel.from_model(whole)
        expected.add_adapter(adapter)
        for own, other in zip(expected.parts, (client.client_head, body, client.client_tail), strict=True):
            own.prefix.load_state_dict(other.prefix.state_dict())
    special = [whole.config.gmask_token_id, whole.config.bos_token_id] if generation == 1 else []
    ids = torch.tensor([[5, 6, 7, *special, 8]])
    with torch.no_grad():
        assert (client.eval()(ids).logits - expected.eval()(ids).logits).abs().max() <= 1e-5


def test_code_of_a_repository_runs_only_if_permitted(tmp_path):
    name = str(write_repository(tmp_path, 1, ["a warm film in Paris", "yes no Rome"] * 8))
    for load in (lambda: load_server_body(name, SplitConfig()), lambda: load_client_model(name, SplitConfig(), "a")):
        # The second message follows if another test has registered a config class for this model type.
        with pytest.raises(ValueError, match="trust_remote_code|Unrecognized configuration class"):
            load()
