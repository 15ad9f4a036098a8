"""``eval "$(python -m sglang_cpu_eagle)"``: what a shell needs to start SGLang on a machine without a GPU."""

from __future__ import annotations

import os
import shlex

from sglang_cpu_eagle import cpu_environment


def main() -> None:
    """Print the variables that differ from this process's, as a POSIX shell takes them."""
    for name, value in cpu_environment(os.environ).items():
        if os.environ.get(name) != value:
            print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
