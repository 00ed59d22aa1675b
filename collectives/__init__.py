"""Collectives: verified programs, the stepper that walks them, groups and step commit."""
