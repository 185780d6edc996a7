"""`python -m tests.bench [NAME …] [-- OPTIONS]`: run the benchmarks named, or all that a machine without a GPU can run.

`python -m tests.bench ops --threads 1` passes the options on to the one benchmark named.
"""

import os
import subprocess
import sys

from services.threads import thread_variables

BENCHES = {
    "ops": "tests.bench.ops_bench",
    "reference": "tests.bench.reference_bench",
    "auditor": "tests.bench.auditor_bench",
    "auditor-job": "tests.bench.auditor_job_bench",
    "vllm": "tests.bench.vllm_bench",
    "megatron": "tests.bench.megatron_bench",
    "demo": "tests.bench.demo_bench",
}


def main() -> int:
    """Run each benchmark in its own process; the exit code is 1 if any of them misses a goal."""
    names = [a for a in sys.argv[1:] if a in BENCHES]
    options = [a for a in sys.argv[1:] if a not in BENCHES and a != "--"]
    if options and len(names) != 1:
        print(
            f"bench: {options[0]!r} is neither a benchmark ({', '.join(BENCHES)}) nor an option of one named benchmark"
        )
        return 2
    codes = []
    for name in names or BENCHES:
        print(f"== {name}", flush=True)
        environment = os.environ | thread_variables(os.cpu_count() or 1)  # as the job's processes have it
        command = [sys.executable, "-m", BENCHES[name], *options]
        codes.append(subprocess.run(command, check=False, env=environment).returncode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
