"""Children that are operating-system processes, on this host or another, and the places where they run.

`process_actor.py` is the actor of one process; `placement.py` the sans-I/O machine that assigns places;
`forks.py` makes processes by forking a template; `devices.py` pools them, one for each core or device.
Imports the actor system and `zbmd.actors.process`. Begin reading at `devices.py`.
"""
