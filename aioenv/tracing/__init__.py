"""Timelines of the parent and its workers: collected during a run, written as JSON for Perfetto and Chrome.

Times are those of `time.perf_counter`. On Linux (CLOCK_MONOTONIC), macOS and Windows all processes of a machine share
that clock. So times of a worker and of the parent can be compared directly.

A worker writes a row for each action into a *ring* of shared memory, which it opens by name (`/proc/PID/fd/N`): its
replies carry nothing more. The parent records its own actions, and the step that each request belongs to. Without such
memory (not Linux) a trace has the parent's side alone.
"""
