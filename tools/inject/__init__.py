"""`zbmd inject`: slow a rank of a running job on purpose, to see that it is named, moved away from or
replaced.

May import `cli` and the layers. `effects` are what is done to a rank, `guardian` undoes them even after `kill
-9` of the command. Start reading at `command`.
"""
