"""Scripts of ranks with a fault, run by their paths.

A line that a diagnosis should name has `# FAULT` and the names of its faults.
"""
