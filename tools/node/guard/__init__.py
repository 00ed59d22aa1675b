"""`python -m zbmd.torch.run`: one process per rank that a launcher of others starts, and that never dies.

torchrun, srun or mpirun starts a guard where it would start a rank. One guard of each host supervises the
ranks of that host, as `zbmd-node run` does; the others stand for their ranks until these have ended. May
import `node`'s modules. Begin with `command`.
"""
