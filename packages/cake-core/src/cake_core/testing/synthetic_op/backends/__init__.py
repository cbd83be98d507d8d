"""Backends of the synthetic op, by device."""
