"""What could be told of clients' rows from what left them, measured where the rows are at hand: in a simulation."""

from .pseudo_samples import PseudoSampleAudit, SampleOverlap, nearest_tokens, plot_pseudo_samples


__all__ = ["PseudoSampleAudit", "SampleOverlap", "nearest_tokens", "plot_pseudo_samples"]
