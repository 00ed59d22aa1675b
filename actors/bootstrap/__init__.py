"""How a node finds its cluster from what its user already has: a launcher's environment, flags, a store.

hostlist     lists of hosts as Slurm writes them
readings     what one source says, and the numbers and addresses it says it with
torchrun     the environment of torchrun and of its workers
slurm        a step of a Slurm job
mpi          Open MPI, and what speaks PMI (MPICH's Hydra, Intel MPI)
kubernetes   a StatefulSet or an indexed Job behind a headless service
merge        all sources together, in a stated order, each fact with where it came from
founding     what follows for this node: whom it asks or that it founds, where it listens, what it is called
etcd*        etcd as a store of doors, and as the witness between two hosts
"""
