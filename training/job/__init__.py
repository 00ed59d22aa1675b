"""One training job over any task: epochs, commit, ledger, checkpoints, evaluation and records.

May import redundancy, run, checkpoint, profiler and what they may. Start reading at `job.py`.
"""
