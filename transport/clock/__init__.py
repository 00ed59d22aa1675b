"""Clocks: the hybrid logical clock of frames, deadlines derived from one budget, offsets between hosts.

Imports `errors` alone. Begin with `deadlines`.
"""
