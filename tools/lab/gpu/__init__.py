"""Checks on a real GPU (`python -m zbmd.tools.lab.gpu`): memory, collectives, kills of device workers."""
