"""One node's part in running the jobs of a cluster: which ranks start here, when a view is entered.

`node_machine` decides, from the job table that the members agree on (`cluster.state.job_table`);
`node_driver` does it with real processes, and `hosted_job` holds the links of one job's ranks. `host` runs a
job on this host alone, as the only one of a cluster of one node (`LocalPort`); `single_job` is the machine
of a node that `zbmd-node run` started for one job on several.

`rank_processes` forks, signals and reaps the ranks, over the template of `actors.process`; `host_links`
listens for them and watches for deaths; `reports` are the reports to the owner of a run. May import
`cluster.state`, `cluster.port`, `actors.rank` and what is below. Begin with `node_machine`.
"""
