"""Ranks that somebody else has started: one supervisor process a host adopts them.

torchrun, `mp.spawn`, mpirun or a shell starts the processes; nobody of ours is their parent. One of each host
starts a `supervisor` (`client.start`), and each attaches to it (`client.attach`): from then on it has what a
forked rank has, and the host is that of `zbmd-node run`, with a template that forks nothing. A rank that dies
is not replaced, and none is ever killed. May import `actors.cluster`. Begin with `machine`.
"""
