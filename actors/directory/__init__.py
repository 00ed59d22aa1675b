"""Names and groups of actors that all processes of a view agree on.

`machine.py` is the sans-I/O machine, with its events in `events.py`; `driver.py` runs it in an actor of each
process; `names.py` is what programs call. Imports the core alone. Begin reading at `names.py`.
"""
