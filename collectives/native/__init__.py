"""Compiled parts: the stepper that runs programs, its counterpart for remote members, and the fast path.

Each module has a `.pyi` with its documentation. Imports the transport's native modules and `flight`. Begin
with `_stepper.pyi`.
"""
