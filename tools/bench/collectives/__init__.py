"""`zbmd bench collectives`: every operation among ranks of this host, beside its peers."""
