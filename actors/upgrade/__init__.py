"""Changes of code while actors live: prepare everywhere, try on canaries, keep or take back.

`coordinator.py` (with the agent of each process) and `ledger.py` are sans-I/O machines; `driver.py` and
`keeper.py` run them; `local.py` changes the actors of one process. Imports the core alone. Begin reading at
`driver.py`.
"""
