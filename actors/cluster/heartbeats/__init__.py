"""Heartbeats between nodes: a native thread exchanges them, a phi-accrual detector judges silence.

`driver` ties the native thread (`_heartbeat`) to the `detector`; `connections` opens the TCP connections that
carry the beats and moves them to RDMA where both ends have it, as `route_machine` decides. Imports no other
sub-package of the cluster. Begin with `detector`, then `driver`.
"""
