"""`zbmd bench`: time the layers through their public API, with peers in the same run.

May import `cli` and the layers. Start reading at `command.py`; `peer_catalogue.py` lists the peers, `peers/`
holds their programs, `stats.py` the medians and intervals. Benchmarks of our own parts are in `lab/bench`.
"""
