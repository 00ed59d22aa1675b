"""Tagged send and receive between the members of a group, within an epoch and across epochs.

`tag_machine` matches messages with receives (sans-I/O); `elastic_machine` does so across epochs; `tagged` and
`elastic` drive them; `actor` receives the messages of `wire`. Imports programs, device and actors. Begin with
`tag_machine`.
"""
