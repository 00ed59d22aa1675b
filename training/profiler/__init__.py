"""The profiler of a training run: spans, FLOPs and the use of a machine, written into the run's directory.

`profiler` is one rank's; `lines` (which adds up a run) and `ring` are its files; `peak` measures the machine.
Imports `model`, `autograd`, `files` and collectives. Begin with `profiler`; see docs/GUIDE_PROFILE.md.
"""
