"""What the time of a rank's steps went into: spans, FLOPs, the machine's peak, and the files that say so."""
