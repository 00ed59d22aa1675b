"""Supervisors, as those of Erlang/OTP, and children that are processes.

`machine.py` is the sans-I/O machine and `supervisor.py` the actor that runs it. `process_actor.py`, `forks.py`,
`devices.py` and `remote_hosts.py` are children that are operating-system processes; `placement.py` assigns them
to places. Imports the core and `zbmd.actors.routing`. Begin reading at `supervisor.py`.
"""
