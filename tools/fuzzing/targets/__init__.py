"""Fuzz targets by concern; `zbmd.tools.fuzzing.registry` lists them all."""
