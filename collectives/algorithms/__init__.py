"""Collective algorithms: the programs of each operation.

`catalogue` lists every algorithm with the function that builds its programs and the specification that they
must meet; the other modules build the programs of one family of algorithms each. All of it is pure: no I/O,
no clock. Imports only `zbmd.collectives.programs`. Begin with `catalogue`, then `direct`, the simplest.
"""
