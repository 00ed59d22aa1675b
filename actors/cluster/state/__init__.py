"""The state that a cluster's members agree on: nodes, the view of each epoch, the table of its jobs.

Plain data and pure functions, the same on every node: `node_id` names nodes and their incarnations,
`job_table` holds jobs and the orders that change them, `job_rules` derives the next table, and `view` the
next view and the quorum rule. Imports no other part of the cluster. Begin with `view`.
"""
