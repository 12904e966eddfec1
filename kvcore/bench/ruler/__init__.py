from kvcore.bench.ruler.task import Ruler

__all__ = ["Ruler"]
