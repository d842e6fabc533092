"""Measurements of the transports, side by side: `python bench/transport.py`."""
