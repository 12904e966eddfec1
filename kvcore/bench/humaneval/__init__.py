from kvcore.bench.humaneval.task import HumanEval

__all__ = ["HumanEval"]
