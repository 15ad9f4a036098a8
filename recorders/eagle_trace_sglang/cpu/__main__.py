"""``eval "$(python -m eagle_trace_sglang.cpu)"``: what a shell needs to start SGLang on a machine without a GPU."""

from __future__ import annotations

import os
import shlex

from eagle_trace_sglang.cpu import cpu_environment
from eagle_trace_sglang.plugin import CPU_KERNELS


def main() -> None:
    """Print the variables that differ from this process's, as a POSIX shell takes them."""
    for name, value in (cpu_environment(os.environ) | {CPU_KERNELS: "1"}).items():
        if os.environ.get(name) != value:
            print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
