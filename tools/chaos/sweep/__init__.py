"""Kill a rank of a training job at every kill point (`python -m zbmd.tools.chaos.sweep`)."""
