"""Agreement on the cluster's membership without a coordinator: one Paxos decree for each view.

`machine.ClusterMachine` is the state machine; its parts are `rounds` (who observes whom, a question down a
tree and the merged answers, the Paxos acceptor), `reports` (who is reported dead, and when that is believed).
`witness` is the external tie-breaker for a view that is cut in half. Simulations are in `actors.simulated`.
Begin with `machine`.
"""
