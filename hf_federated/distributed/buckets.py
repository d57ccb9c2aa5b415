"""Buckets of tensors, so that one collective operation transfers many small tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


BUCKET_BYTES = 32 * 2**20


def buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group consecutive tensors of the same dtype and device into buckets.

    A bucket has at most `BUCKET_BYTES` bytes. A larger tensor forms its own bucket.
    """
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        same = bucket and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not same or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
