"""`zbmd-node doctor`: check a machine: devices, links of each pair of processes, deadlines, network, peers.

May import `cli` and the layers. Start reading at `command.py`; `checks.py` says what is wrong and what to do.
"""
