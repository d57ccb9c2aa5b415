"""Split language models (FL-GLM): a client holds the first and last blocks, and a server holds the other blocks."""

from .adapters import adapter_state, add_adapter, copy_adapter, load_adapter, merge_adapters, save_adapter
from .body import BodyServer
from .boundary import Boundary, Link, LocalLink
from .cache import SplitCache
from .client_batch import ClientBatchRunner
from .cut import Cut
from .families import LAYOUTS, layout_of
from .fingerprint import ModelFingerprint
from .layouts import AttentionInputs, BlockRunner, Layout
from .loading import load_parts
from .messages import Backward, Forget, Forward, Gradient, Hidden
from .model import SplitModel
from .parts import Part
from .prefix import Prefix
from .saving import load_saved_parts, merge_parts, save_parts
from .session_config import SplitSessionConfig
from .wire import Wire


__all__ = [
    "LAYOUTS",
    "AttentionInputs",
    "Backward",
    "BlockRunner",
    "BodyServer",
    "Boundary",
    "ClientBatchRunner",
    "Cut",
    "Forget",
    "Forward",
    "Gradient",
    "Hidden",
    "Layout",
    "Link",
    "LocalLink",
    "ModelFingerprint",
    "Part",
    "Prefix",
    "SplitCache",
    "SplitModel",
    "SplitSessionConfig",
    "Wire",
    "adapter_state",
    "add_adapter",
    "copy_adapter",
    "layout_of",
    "load_adapter",
    "load_parts",
    "load_saved_parts",
    "merge_adapters",
    "merge_parts",
    "save_adapter",
    "save_parts",
]
