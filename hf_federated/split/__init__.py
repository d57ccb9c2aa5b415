"""Split language models: the first and last blocks are a client's, the others a server's (FL-GLM)."""

from .adapters import adapter_state, add_adapter, load_adapter, merge_adapters, save_adapter, take_adapter
from .body import BodyServer
from .boundary import Boundary, Link, LocalLink
from .cache import SplitCache
from .cut import Cut
from .families import LAYOUTS, layout_of
from .fingerprint import ModelFingerprint
from .layouts import BlockRunner, Layout, Places
from .loading import load_parts
from .meeting import Meeting
from .messages import Backward, Forget, Forward, Gradient, Hidden
from .model import SplitModel
from .parts import Part
from .prefix import Prefix
from .saving import load_saved_parts, merge_parts, save_parts
from .terms import Terms
from .wire import Wire


__all__ = [
    "LAYOUTS",
    "Backward",
    "BlockRunner",
    "BodyServer",
    "Boundary",
    "Cut",
    "Forget",
    "Forward",
    "Gradient",
    "Hidden",
    "Layout",
    "Link",
    "LocalLink",
    "Meeting",
    "ModelFingerprint",
    "Part",
    "Places",
    "Prefix",
    "SplitCache",
    "SplitModel",
    "Terms",
    "Wire",
    "adapter_state",
    "add_adapter",
    "layout_of",
    "load_adapter",
    "load_parts",
    "load_saved_parts",
    "merge_adapters",
    "merge_parts",
    "save_adapter",
    "save_parts",
    "take_adapter",
]
