"""Clusters: machines on which the workers of a vector env are placed."""
