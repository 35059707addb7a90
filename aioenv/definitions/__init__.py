"""Carry the classes, functions and globals of a script or notebook into workers: each exists once in a worker.

1. When a vector env is made, `DefinitionCollector` (`collect.py`) finds the definitions that its factories reach.
2. `DefinitionEmitter` writes them as a series of pickles; `CodeSnapshot` keeps the pickles (both in `snapshot.py`)
   that each worker needs, large ones in memory that workers map.
3. A worker calls `restore` (`restore.py`), which loads the pickles and puts the definitions into its `__main__`,
   under their own names; `rebuild.py` has the functions that the pickles call.
4. From then on messages refer to a definition by its number in the `DefinitionTable` (`table.py`), which parent and
   worker share. Definitions that are made later travel with the message that mentions them (`snapshot.py`).
"""
