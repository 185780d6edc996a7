"""How the threads of an engine's process wait, said before the process starts, since OpenMP reads it once."""

# A worker of torch's OpenMP spins for milliseconds after each of its regions, on the core that the strict ops' own
# threads (or the other engine) want next; some 50 microseconds serve torch as well. On two cores it makes a strict
# step of SmolLM2 1.2 times as fast and the strict rollout 1.4 times, and the native engines no slower:
# docs/results/cpu-engines.md.
_OPENMP_SPINS = "3000"


def thread_variables(threads: int) -> dict[str, str]:
    """Environment of an engine's process with `threads` threads; strict and native alike."""
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": _OPENMP_SPINS}
