"""Command-line tools: zbmd-node, zbmd and the demo."""
