"""Kill a rank at every instruction of every collective program (`python -m zbmd.tools.chaos.programs`)."""
