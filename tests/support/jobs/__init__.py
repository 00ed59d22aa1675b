"""Small training jobs under a forked host."""
