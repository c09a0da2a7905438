"""The door to every op: picks the implementation to run, today the plain torch reference for all of them."""

from triptych_kernels.attention_batch import AttentionBatch
from triptych_kernels.reference import kv_write, paged_attention, sample, uniform_noise

__all__ = ["AttentionBatch", "kv_write", "paged_attention", "sample", "uniform_noise"]
