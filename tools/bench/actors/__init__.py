"""`zbmd bench actors`: asks, tells, and the cost of spawning, keeping and restarting actors."""
