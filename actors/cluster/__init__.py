"""A cluster of nodes without a coordinator: membership, the jobs that run on it, and the nodes themselves.

Members agree on one view after the other by majority of the last one; the table of jobs is part of the
view. `state` is what they agree on, `membership` how, `heartbeats` who is alive, `jobs` what runs on one
node, and `node` ties all of it to sockets and threads. `messages` and `contracts` are what nodes send each
other, `peer_links` the links between them, `node.client` how a script joins.

Every protocol is a sans-I/O machine; simulations of whole clusters are in `actors.simulated`. May import
`actors.rank` and everything below it. Begin with `state.view`, then `membership.machine`.
"""
