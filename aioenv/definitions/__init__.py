"""Classes, functions and globals of a script or notebook, carried into workers: each exists once in a worker.

The parent takes a snapshot of what factories reach when a vector env is made (`collect.py`, `emit.py`); a worker
restores it under its own `__main__` (`restore.py`). Messages then refer to definitions by number (`table.py`).
"""
