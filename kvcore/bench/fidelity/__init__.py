"""Fidelity: how close the next-token distribution stays to that of the full cache."""

from kvcore.bench.fidelity.task import Fidelity

__all__ = ["Fidelity"]
