"""Needle in a haystack: retrieval of one planted sentence, context length x depth."""

from kvcore.bench.niah.task import NeedleInAHaystack

__all__ = ["NeedleInAHaystack"]
