"""Communicators: the blocking collective operations of one group in one epoch.

`communicator` has the operations; `pieces` cuts one into native runs; `algorithm_choice` and `cost_model` say
what "auto" stands for; `blocking` is `group.blocking`. Imports `execution`, `algorithms`, `programs`,
`device`, `flight` and `native`. Begin with `communicator`.
"""
