"""Hangs: who holds an event loop, which handler makes no progress, and which rank is the root cause.

`loop_watch.py` watches one loop; `watchdog.py` reports what a rank waits for; `collector.py`, `verdict.py`
and `root_cause.py` find the cause over all ranks. `introspection.py` shows the actors of a process. Imports
the core and supervision. Begin reading at `watchdog.py`.
"""
