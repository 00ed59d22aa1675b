"""Network namespaces and the process inside."""
