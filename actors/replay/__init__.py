"""Recording and replay of actors: each incarnation is a stream of turns that its code can be run against.

`events.py` says what is recorded; `recording.py` records, `stage.py` replays, and `machine.py` makes that a
machine. Imports the core, the services of an actor system and the simulator's loop. Begin reading at
`traced.py`.
"""
