"""Execution: a rank's plan for a request, and the executors that run it on mapped or remote memory.

`plan` proves the programs of all ranks and makes plans; `executor` runs one natively where all
members share memory, `remote_executor` where some are on other hosts. Imports `algorithms`, `programs`,
`native`, `device` and the transport. Begin with `plan`, then `executor`.
"""
