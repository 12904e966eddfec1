"""FreqDepthKV: depth-shared KV caches (arXiv 2607.06519). Importing the package registers `freqdepth`."""

from freqdepth.method import FreqDepth

__all__ = ["FreqDepth"]
