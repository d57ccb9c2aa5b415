"""The steps of `exchange_codec`."""

from __future__ import annotations

from typing import Any, cast

from ..codecs import Codec, Float32
from ..config import FederatedConfig
from ..utils.algorithm_names import EXCHANGE_CODEC_NAMES
from ..utils.arguments import require_one_of
from .base import Postprocessor
from .encode_state import EncodeState
from .encode_update import EncodeUpdate


# The argument of `exchange_codec_kwargs` that is no argument of the codec, and its values.
DIRECTION = "direction"
DIRECTIONS = ("both", "up", "down")


def codec_direction(config: FederatedConfig) -> str:
    """Return which messages `exchange_codec` encodes: `"both"`, `"up"`, `"down"`, or an empty text without a codec."""
    return "" if config.exchange_codec is None else _arguments(config).get(DIRECTION, DIRECTIONS[0])


def _arguments(config: FederatedConfig) -> dict[str, Any]:
    # The type of the field includes text for the command line.
    return cast(dict[str, Any], config.exchange_codec_kwargs)


def exchange_codec_steps(config: FederatedConfig) -> list[Postprocessor]:
    """
    Build the steps that `exchange_codec` and `exchange_codec_kwargs` name.

    Args:
        config ([`FederatedConfig`]): The configuration.

    Returns:
        `list[Postprocessor]`: The steps, in order. Empty without a codec, or with a codec that loses nothing.

    Raises:
        ValueError: If there are arguments without a codec, or the codec does not accept an argument.
    """
    if config.exchange_codec is None:
        if config.exchange_codec_kwargs:
            raise ValueError(
                f"exchange_codec_kwargs={config.exchange_codec_kwargs} is set, but `exchange_codec` is None, so no "
                "message is encoded. Set exchange_codec='int8', or leave the arguments out."
            )
        return []
    direction = codec_direction(config)
    require_one_of(f"{DIRECTION} of exchange_codec_kwargs", direction, DIRECTIONS)
    arguments = {name: value for name, value in _arguments(config).items() if name != DIRECTION}
    codec: Codec = EXCHANGE_CODEC_NAMES.build(config.exchange_codec, arguments, Codec)
    if codec.is_exact:
        return []
    if config.secure_aggregation is not None:
        # A client sends its change as integers, which no further step encodes.
        return [EncodeState(codec)]
    if direction == "up":
        return [EncodeUpdate(codec)]
    if direction == "down":
        # A change, so that the server adds it to its own state.
        return [EncodeState(codec), EncodeUpdate(Float32(), error_feedback=False)]
    return [EncodeState(codec), EncodeUpdate(codec)]
