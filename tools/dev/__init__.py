"""Checks of the repository: `preflight.py` before set-up, `tidy.py` in `make lint`. Not in the wheel."""
