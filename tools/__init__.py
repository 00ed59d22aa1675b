"""Command-line tools. Start reading at `entry/zbmd.py`, the table of the commands of `zbmd`.

Shipped: `cli` (options, settings, console) < `bench`, `doctor`, `replay`, `runs` < `demo`, `plan`, `sim` <
`node` < `train` < `entry`. Not in the wheel: `lab`, `chaos`, `fuzzing`, `dev`; nothing that ships imports
them. import-linter checks this order (pyproject.toml).
"""
