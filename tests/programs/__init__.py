"""Programs that tests start as ranks, scripts or peers; each file is run by its path."""
