"""`zbmd sim`: run the machines in a simulated world, hunt for failing seeds, model collectives at scale.

May import `bench` (tables and plots), `cli` and the layers. Start reading at `command.py`; `scenarios.py`
lists what is simulated.
"""
