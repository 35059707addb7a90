"""Watching a run: a page in the browser that shows slots as they step, served by a process of its own."""
