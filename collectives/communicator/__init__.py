"""Communicators: the blocking collective operations of one group in one epoch.

`communicator` has the operations, those over rows and packs in `uneven`. A `Call` says what was called,
`planning` how it is carried out, and with `cost_model` what "auto" stands for; `turns` carries it out, in
native runs that `pieces` makes. `group_trials` measures a new group; `operations` declares the operations of
groups. Imports `execution`, `algorithms`, `programs`, `device`, `flight` and `native`. Begin with
`communicator`.
"""
