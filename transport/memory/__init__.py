"""Memory that peers reach: segments, arenas, regions and transfers.

`segment` is a process's shared memory, `arena` allocates in it, `region` is registered memory that peers put
into and get from, `frame_loans` lends payloads of large frames. Imports `host` and `native`. Begin with
`region` and `segment`.
"""
