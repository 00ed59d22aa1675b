"""The output of a run while it trains: the commit log, checkpoints, weights, reports and its result.

`ledger` is the commit log and its audit; `journal` decides which rank writes what; `reporting` sends results
to the host; `load_weights` reads weights back; `snapshots` is the snapshot process. Imports
`checkpoint`, `step` and what they import. Begin with `journal`.
"""
