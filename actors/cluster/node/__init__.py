"""A running node: its incarnations on a thread of their own, its links, its actors, and the admin interface.

`node.ClusterNode` is what a process uses; `incarnations` runs one incarnation after the other, `incarnation`
drives the machines of one of them. `actors` links the actor systems of all nodes, `admin_actor` and
`contracts` answer commands, `client` and `join` are the other ends of that. `persistent_state` is what
survives a restart.
"""
