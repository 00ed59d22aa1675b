"""Links to processes beyond the own view, made when something is sent there.

`machine.py` is the sans-I/O machine and `routes.py` its driver; the other modules let external clients join a
cluster by way of one of its processes. Imports the core alone. Begin reading at `routes.py`.
"""
