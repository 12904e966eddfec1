"""The methods that both papers compare with: one file each, registered on import."""

from kvcore.baselines.chunkkv import ChunkKV
from kvcore.baselines.compose import Compose
from kvcore.baselines.full import Full
from kvcore.baselines.h2o import H2O
from kvcore.baselines.kivi import Kivi
from kvcore.baselines.kvquant import KVQuant
from kvcore.baselines.minicache import MiniCache
from kvcore.baselines.oracle_topk import OracleTopK
from kvcore.baselines.pyramidkv import PyramidKV
from kvcore.baselines.quest import Quest
from kvcore.baselines.retroinfer import RetroInfer
from kvcore.baselines.scissorhands import Scissorhands
from kvcore.baselines.semanticache import SemantiCache
from kvcore.baselines.sentencekv import SentenceKV
from kvcore.baselines.snapkv import SnapKV
from kvcore.baselines.streaming_llm import StreamingLLM

__all__ = [
    "H2O",
    "ChunkKV",
    "Compose",
    "Full",
    "KVQuant",
    "Kivi",
    "MiniCache",
    "OracleTopK",
    "PyramidKV",
    "Quest",
    "RetroInfer",
    "Scissorhands",
    "SemantiCache",
    "SentenceKV",
    "SnapKV",
    "StreamingLLM",
]
