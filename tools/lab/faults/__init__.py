"""A corpus of injected faults with labels, run by real launchers, and how many of them are diagnosed rightly.

`kinds.py` has the kinds of faults, `corpus.py` runs cases and judges the diagnoses, `slow.py` makes profiles
of slow ranks, `programs/` are the ranks' scripts. May import all of zbmd. Begin reading at `kinds.py`.
"""
