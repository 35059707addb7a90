"""Interfaces of other libraries over a vector env. Each needs its library, and is imported by who wants it."""
