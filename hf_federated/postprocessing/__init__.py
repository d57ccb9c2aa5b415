"""Steps between a client's training and the aggregate: clipping, narrower dtypes, a user's own."""

from .postprocessing import ClipUpdate, Postprocessor, SendChanges, cast_floating, run_client_side, run_server_side


__all__ = ["ClipUpdate", "Postprocessor", "SendChanges", "cast_floating", "run_client_side", "run_server_side"]
