"""One engine of SGLang (``python -m tests.support.engine_run JOB``): options and requests go in, answers come out."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(job: Path) -> None:
    """Run the requests of a job one after another, and write their answers where it says."""
    import sglang

    asked = json.loads(job.read_text())
    engine = sglang.Engine(**asked["options"])
    try:
        answers = [engine.generate(**request) for request in asked["requests"]]
    finally:
        engine.shutdown()
    Path(asked["answers"]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
