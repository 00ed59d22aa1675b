"""`zbmd demo`: train with several ranks, kill one, and show that nothing is lost.

May import `runs` and `cli`. Start reading at `command.py`: its `Watch` observes the host and deals the kill.
"""
