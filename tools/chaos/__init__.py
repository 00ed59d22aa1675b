"""Kills at every point: sweeps, storms and soaks of real processes. Not in the wheel.

May import what ships. Start reading at `small_job.py`, the training job that most of them kill.
"""
