"""Checkpoints that the snapshot process of a host writes, from the memory that it holds.

A rank says where in its memory the version lies that all ranks have come to (`messages.SaveShard`), and goes
on once that is copied: no thread of its own copies, encodes or writes. Once all ranks of the job have said
so, nobody else is needed: the process writes all shards and publishes the checkpoint, by the machine that
ranks use as well (`saving`), whoever dies meanwhile. If the ranks are on several hosts, each process writes
the shards of its own and a part of the index (`parts`), and whoever finds all parts in the storage that they
share publishes the checkpoint (`gathering`): one of these processes, or the ranks, by their votes.

Nothing is published before the commit log has its step (`commitment`).

`python -m zbmd.training.run.snapshots` is that process: `actors.snapshots.holder` with `service`. `line` is
a rank's connection to it.
"""
