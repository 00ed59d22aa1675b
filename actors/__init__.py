"""Actors: typed contracts, bounded mailboxes, references, supervision and nodes."""
