"""Elastic groups: operations that the survivors complete when a member dies in the middle.

`operations` is the public surface, `group` drives the repair machine of `zbmd.collectives.repair`, `views`
moves a process's groups from view to view, `subgroups` splits a group. Imports `group`, `repair`, `p2p` and
`communicator`. Begin with `operations`, then `group`.
"""
