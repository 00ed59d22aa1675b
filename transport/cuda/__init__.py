"""Regions in device memory: CUDA IPC inside a host, staging elsewhere.

`region` registers arrays for other processes and uses theirs, `peer` opens them, `staging` copies where they
cannot be opened; `copies`, `opened` and `pieces` are machines (sans-I/O). `api` is what is asked of CUDA and
`runtime` its implementation by cupy, imported when it is first used. Imports `memory`. Begin with `region`
and `peer`.
"""
