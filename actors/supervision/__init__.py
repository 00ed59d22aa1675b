"""Supervisors, as those of Erlang/OTP: they start, restart and stop their children.

`machine.py` is the sans-I/O machine, with its events and policies in `events.py`; `supervisor.py` is the
actor that runs it. Imports the core alone. Begin reading at `supervisor.py`.
"""
