"""`zbmd bench p2p`, `put` and `detect`: the processes that are timed, and how they connect."""
