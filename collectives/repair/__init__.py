"""Repair of elastic operations: all members of a group bring an operation to one end when a member dies in
it.

`machine` is the sans-I/O protocol, with its decision, `events` its vocabulary, `wire` the report;
`operations_*` say how each operation runs, is repeated, copied and adopted; `adoption` reads inputs of dead
members; `splits` records sub-groups. Imports programs, communicator and device; `elastic` drives it. Begin
with `machine`.
"""
