"""Worlds in which machines run under random histories."""
