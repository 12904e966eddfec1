"""Importing this module registers every benchmark."""

from kvcore.bench.efficiency import Efficiency
from kvcore.bench.fidelity import Fidelity
from kvcore.bench.gsm8k import GSM8K
from kvcore.bench.humaneval import HumanEval
from kvcore.bench.infinitebench import InfiniteBench
from kvcore.bench.longbench import LongBench
from kvcore.bench.niah import NeedleInAHaystack
from kvcore.bench.ruler import Ruler
from kvcore.bench.samsum import SAMSum
from kvcore.bench.zoom import Zoom

__all__ = [
    "GSM8K",
    "Efficiency",
    "Fidelity",
    "HumanEval",
    "InfiniteBench",
    "LongBench",
    "NeedleInAHaystack",
    "Ruler",
    "SAMSum",
    "Zoom",
]
