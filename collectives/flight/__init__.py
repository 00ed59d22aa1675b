"""The flight recorder: a ring of a group's latest operations, written to a file on an error.

`recorder` reads the ring that `_flight` writes. Imports nothing of collectives. Begin with `recorder`.
"""
