from kvcore.bench.zoom.task import Zoom

__all__ = ["Zoom"]
