"""SeKV: a KV cache as a map of variable resolution (arXiv 2606.31145)."""

from sekv.cache import SeKVCache
from sekv.method import SeKV

__all__ = ["SeKV", "SeKVCache"]
