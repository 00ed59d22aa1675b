"""One node's part in running the jobs of a cluster: which ranks start here, when a view is entered.

`node_machine` decides, from the job table that the members agree on (`cluster.state.job_table`);
`node_driver` does it with real processes, and `hosted_job` holds the links of one job's ranks. `host` runs a
job on this host alone, as the only one of a cluster of one node (`local_port`); `single_job` is the machine
of a node that `zbmd-node run` started for one job on several. May import `cluster.state`, `actors.host` and
what is below. Begin with `node_machine`.
"""
