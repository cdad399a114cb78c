"""Grids of runs, compared: `fastclip compare`."""
