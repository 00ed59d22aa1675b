"""Code that all commands share: options, settings of a job, the console, traces, Ctrl-C while modules load.

Imports no other package of `zbmd.tools`. Start reading at `settings.py`: command line over environment over
TOML file over default.
"""
