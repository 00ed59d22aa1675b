"""The programs that `zbmd bench` runs beside our own: peers in their best documented configuration.

Each speaks the few words of `control`, so that all of them stay up for the whole run and take turns.
"""
