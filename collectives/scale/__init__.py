"""Collectives of thousands of ranks on a model of a network: the programs of the catalogue, walked in time.

fabric      the network: hosts, ports, latencies and rates
placement   which ranks are on which host
roles       a rank's neighbours in an algorithm, and which ranks have equal programs
schedules   the programs of all ranks in the form of the compiled timeline
flat_ring   the ring over all ranks, a vector of ranks at a time
bounds      what each algorithm cannot be faster than
scaling     one operation, undisturbed or with deaths in it
"""
