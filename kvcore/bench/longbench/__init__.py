from kvcore.bench.longbench.task import LongBench

__all__ = ["LongBench"]
