"""Jobs and clusters on several hosts of a laboratory network; hosts are killed while they work."""
