"""What both methods share: the cache contract, attention, kernels, budgets, baselines and benchmarks."""

__version__ = "0.1.0"
