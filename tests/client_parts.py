"""The client half of a method alone, without a worker.

```python
part = received(FedProx(0.1), Fit(0, "a", 0, state, settings={"proximal_weight": 0.1}))
part.on_gradients(parameters)
update = sent(part)
```
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hf_federated import ClientPart, Method
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.methods import ClientContext


def received(
    method: Method,
    message: Fit | None = None,
    memory: dict[str, Any] | None = None,
    model: Any = None,
    private: tuple[Any, Any] | None = None,
) -> ClientPart:
    """
    Build the client half of a method after it has received a message.

    Args:
        method (`Method`): The method.
        message (`Fit`, *optional*): The message. Defaults to a message without tensors.
        memory (`dict`, *optional*): The memory of the half on the client.
        model (`PreTrainedModel`, *optional*): The client's model.
        private (`tuple`, *optional*): Trainer and exchange of the client's private model.
    """
    client = SimpleNamespace(trainer=SimpleNamespace(model=model))
    opened = None if private is None else lambda: private
    context = ClientContext("a", client, memory={} if memory is None else memory, open_private_model=opened)
    part = method.on_client().client(context)
    part.receive(message or Fit(0, "a", 0, {}))
    return part


def sent(part: ClientPart) -> ClientUpdate:
    """The update that a client half sends after a local training without a trained state."""
    return part.send(ClientUpdate(0, "a", {}, num_examples=1, num_tokens=0, num_steps=1))
