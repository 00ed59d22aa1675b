"""The console scripts `zbmd` and `zbmd-node`, and the table of the commands of `zbmd`.

May import every package that ships; the table imports the module of a command only when it is chosen.
Start reading at `zbmd.py`.
"""
