"""Regions in device memory: CUDA IPC inside a host, staging elsewhere.

`exports` registers arrays for other processes, `peer` and `region` open and use them, `copies`, `opened` and
`pieces` are the machines (sans-I/O), `api` is what is asked of CUDA and `runtime` its implementation by cupy,
imported when it is first used. Imports `memory`. Begin with `region` and `peer`.
"""
