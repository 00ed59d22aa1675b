"""`zbmd train`, which runs a training recipe on a mesh of ranks.

May import `node` (it starts the job through `zbmd-node run`) and `cli`. Start reading at `command.py`.
"""
