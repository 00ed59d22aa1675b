"""Nodes and their incarnations: the names that everything else in a cluster refers to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class NodeKey:
    """One incarnation of a node: the node's fixed id, and a counter that grows with each incarnation."""

    id: int
    incarnation: int

    def __str__(self) -> str:
        return f"node{self.id}#{self.incarnation}"


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """A member of the cluster. `address`: where its links are dialed; `name`: what people call it.

    domain: the failure domain of its host, as its user has named it.
    """

    key: NodeKey
    address: str = ""
    name: str = ""
    domain: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.key})" if self.name else str(self.key)

    @property
    def id(self) -> int:
        """The node's id, the same in all incarnations."""
        return self.key.id
