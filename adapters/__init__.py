"""Adapters: what puts a broker between the parts of an engine. One package for each engine."""
