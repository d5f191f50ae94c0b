"""Engines over several processes: the ranks that mpirun starts."""
