"""Actors that several tests use."""
