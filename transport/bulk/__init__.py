"""Bulk data between hosts: one-sided put, get and notify over TCP stripes.

`machine` decides (sans-I/O), `stream` and `records` are the wire format, `plane` is the thread that moves the
bytes of all peers, and `peer` is its end of one peer. Small puts take `fast_path`. Imports `memory`, `secure`
and `host`. Begin with `machine` and `peer`.
"""
