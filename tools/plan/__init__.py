"""`zbmd plan`: what a pipeline, a checkpoint interval, a cluster or a step costs, before anything runs.

The formulas are pure functions with their source and units: `zbmd.training.checkpoint.intervals`, which
runs follow too, `simulation.py` for the failures that check them, `layout.py` for memory and `roofline.py`
for the time of a step; a step's graph is `zbmd.training.model.graph`'s.
May import `runs` (its style of pictures), `cli` and the training layer. Start reading at `command.py`.
"""
