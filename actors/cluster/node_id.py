"""Nodes and their lives: the names that everything else in a cluster is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class NodeKey:
    """One life of a node: the id that it keeps, and the incarnation, which grows from life to life."""

    id: int
    incarnation: int

    def __str__(self) -> str:
        return f"node{self.id}#{self.incarnation}"


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """A member of the cluster. `address`: where its links are dialed; `name`: what people call it."""

    key: NodeKey
    address: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.key})" if self.name else str(self.key)

    @property
    def id(self) -> int:
        """What it keeps over its lives."""
        return self.key.id
