"""Recording and replay of actors: each life is a stream of turns that its code can be run against.

`events.py` says what is recorded; `recording.py` records, `stage.py` replays, and `machine.py` makes a
replayed life a machine like any other. Imports the core, the services of an actor system and the simulator's
loop. Begin reading at `life.py`.
"""
