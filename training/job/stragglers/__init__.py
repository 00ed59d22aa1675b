"""Stragglers: which rank is slower than it was or than its peers, and why.

`scores` is the statistic, `machine` the pure decision over it, `samples` what each rank measures of a step.
The driver is `zbmd.training.job.slow_ranks`. Imports `profiler` and below. Begin with `machine`; see
docs/GUIDE_STRAGGLERS.md.
"""
