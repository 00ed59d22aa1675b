"""Laboratory networks: hosts as network namespaces, joined by a switch with delay, loss and a bandwidth."""
