"""`zbmd-node`: run jobs on one host or several, and look at hosts, ranks and actors that run.

May import `doctor` and `cli`. Start reading at `cli.py`; `run.py` runs a job on one host, `run_many.py` on
several, `cluster.py` has the commands of a long-lived cluster.
"""
