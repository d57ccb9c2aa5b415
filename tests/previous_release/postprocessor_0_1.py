"""A step that a user wrote for hf_federated 0.1. The file is frozen: a change here would hide a broken interface."""

import dataclasses

from hf_federated import ClipUpdate, Postprocessor


class HalveOnServer(Postprocessor):
    """Sends twice the values and receives a quarter of them, so that the server gets half of the trained values."""

    def client_side(self, update, message):
        assert message.state.keys() == update.state.keys()
        return dataclasses.replace(update, state={name: 2 * value for name, value in update.state.items()})

    def server_side(self, update, state):
        assert state.keys() == update.state.keys()
        return dataclasses.replace(update, state={name: value / 4 for name, value in update.state.items()})


class ClipAndCount(ClipUpdate):
    """Counts the clipped updates."""

    count = 0

    def client_side(self, update, message):
        clipped = super().client_side(update, message)
        self.count += clipped is not update
        return clipped
