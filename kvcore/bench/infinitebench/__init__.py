from kvcore.bench.infinitebench.task import InfiniteBench

__all__ = ["InfiniteBench"]
