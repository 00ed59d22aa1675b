"""Groups: the members of one view, with collectives and messages that a coroutine can await.

`group` has `Group` and `zbmd.group`; `subgroup_driver` agrees on channels for sub-groups; `priority_driver`
orders operations with priorities; `flight_dump` writes what is in flight, `capture` records operations.
Imports `communicator` and `p2p`. Begin with `group`.
"""
