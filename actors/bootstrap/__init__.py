"""Finds a node's cluster from what its user already has: a launcher's environment, flags, an etcd store.

`environments` reads what torchrun, Slurm, MPI and Kubernetes set;
`merge` combines all sources in a stated order, each fact with its source; `one_job_node`
turns the result into a node: which member to join, or that it founds the cluster. `etcd_store` uses etcd as a
store of members and as the witness between two halves of a cluster. `attached` takes ranks that somebody
else has started, and `rank_variables` has what PyTorch needs of their launcher. May import `actors.cluster`.
Begin with `merge`.
"""
