"""The timeline of who worked when: collected while a run goes on, written as JSON that Perfetto and Chrome open.

Times are those of `time.perf_counter`. On Linux (CLOCK_MONOTONIC), macOS and Windows that is one clock for all
processes of a machine, so what a worker says and what the parent says can be laid side by side as they are.

A worker writes a row for each thing that it does into a *ring* of shared memory, which it opens by name
(`/proc/PID/fd/N`): nothing more travels with its replies. The parent keeps what it does itself, and which step each
request was of. Without such memory (not Linux) a trace has the parent's side alone.
"""
