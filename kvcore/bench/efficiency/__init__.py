from kvcore.bench.efficiency.task import Efficiency

__all__ = ["Efficiency"]
