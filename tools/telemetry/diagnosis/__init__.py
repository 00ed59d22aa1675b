"""Diagnosis of a run: from the records that it left to one cause, with what led to it and what to do.

`evidence.py` has the facts, `rules.py` judges them (pure), `readers.py` collects them from a directory or a
log. May import the rest of `telemetry`, and packages below it. Begin reading at `evidence.py`.
"""
