"""Redundancy: keeps what one rank alone holds, so that it survives the end of that rank.

`machine` is the sans-I/O protocol; `interface` is what a job calls; `buddy` keeps a replica at another rank,
`coded` parities at several, `file` the state in a file of the rank's own (`state_file`). Imports
`replicated`, `optim`, `step` and collectives. Begin with `machine`.
"""
