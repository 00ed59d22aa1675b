"""Reverse-mode automatic differentiation on numpy or cupy arrays, and what goes with it.

`tape` records and plays back; `parameter_layout` places parameters in flat arrays; `rng` makes random numbers
that depend on the sample alone; `non_finite_probe` finds the first NaN; `spans` times a step.
Imports only `zbmd.training.native` and transport. Begin with `tape`.
"""
