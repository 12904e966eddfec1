from kvcore.bench.samsum.task import SAMSum

__all__ = ["SAMSum"]
