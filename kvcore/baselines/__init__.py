"""The methods that both papers compare with: one file each, registered on import."""

from kvcore.baselines.full import Full
from kvcore.baselines.oracle_topk import OracleTopK
from kvcore.baselines.streaming_llm import StreamingLLM

__all__ = ["Full", "OracleTopK", "StreamingLLM"]
