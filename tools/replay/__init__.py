"""`zbmd replay`: run the machines of a captured job again, and explain what happened.

May import `cli` and the layers. Start reading at `command.py`; `players.py` replays one machine of each kind.
"""
