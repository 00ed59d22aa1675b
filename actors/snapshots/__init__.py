"""Snapshot processes: the state of a job's ranks on one host, in memory that outlives all of them.

**Which process.** One a job and node, `holder`, started by the launcher once a rank keeps state. It has a
session of its own and needs no parent: it survives `kill -9` of every rank, of template, reaper and
`zbmd-node run`, and of their process groups. It maps nothing and computes nothing by itself: it holds
descriptors. Ranks may ask it for work on that memory, which the program that it runs brings along
(`HolderWork`): `training.checkpoint.held` writes checkpoints. It does not end while that is under way.

**Memory.** The launcher makes one memfd a rank, which has the rank's arena (`transport.memory.kept`). Both
slots of the state are a block of it, stamped with version and digest before a vote for them
(`training.redundancy.stamped`). The launcher hands a duplicate of the descriptor over once; from then on
the holder has each committed version without a copy, and a step costs nothing. (A copy of 256 MiB took 40
to 105 ms of a core, and needs as much memory again.) When the holder ends, by any cause, the kernel frees
what no rank has mapped: nothing can leak.

**Life.** It ends when its launcher reports the end of the job, when `zbmd snapshots RUN --drop` asks for it
while no launcher is there, when it has had no launcher for `--snapshots` (10 min), and at once if its
launcher is lost with nothing to hold. If the holder is lost, the launcher reports it, starts another one
and hands all memory over again; the job does not wait for that.

**Identity.** A holder is found by its abstract socket, whose name has the user, the cookie's tag, the run
(directory and command line) and the job's number. It gives its memory to a launcher with the same
`JobIdentity`: command line, release of zbmd, version of Python, digest of the code, ranks, arena, settings.
Others are refused, with the fields that differ. The job keeps its number, so the stamps of the slots and the
commit log are its own, and it goes on as if all of its ranks had been killed at once. A rank takes memory
only while no other process has it locked (`exclusively`): ranks of a killed launcher may still be ending.

**Wire contract.** One MessagePack message a packet of a SEQPACKET socket, with at most one descriptor. Both
sides check that the other is of the same user (SO_PEERCRED). The launcher that starts a holder keeps one
end of a socket pair, and is attached from the beginning; a later one connects.

    launcher  Attach, Hold + memfd, Finish          tools  Look, Drop          ranks  Look, Work + memfd
    holder    Standing, Memory + memfd, Holds, Dropped, Refused, Worked

**States**: ATTACHED to one launcher, ORPHANED until a deadline, ENDING while work is done, ENDED (`machine`).
`holder` drives the machine, `client` asks it, `keeper` is the launcher's side. Imports `process`,
`transport`. Begin with `machine`.
"""
