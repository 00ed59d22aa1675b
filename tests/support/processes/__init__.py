"""Forked processes, their output and their end."""
