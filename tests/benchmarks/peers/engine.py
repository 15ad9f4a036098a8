"""A process with SGLang's Engine as its user would make it, answering the same prompts whenever told to.

Run as ``python engine.py JOB``, JOB being a JSON file with `arguments` (SGLang's command line), `prompts` (a file),
`max_new_tokens`, `batch` and `address` (a Unix socket on which to be told).
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Client
from pathlib import Path

from eagle_trace.prompts import read_prompts, tokenize


def main() -> None:
    """Answer until told to stop."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import sglang
    from sglang.srt.server_args import prepare_server_args

    engine = sglang.Engine(server_args=prepare_server_args(job["arguments"]))
    tokenizer = engine.tokenizer_manager.tokenizer
    token_ids = [tokenize(prompt, tokenizer) for prompt in read_prompts(Path(job["prompts"]))]
    sampling = {"temperature": 0.0, "max_new_tokens": job["max_new_tokens"]}
    try:
        with Client(job["address"], "AF_UNIX") as connection:
            connection.send("ready")
            while connection.recv() == "answer":
                for start in range(0, len(token_ids), job["batch"]):
                    chunk = token_ids[start : start + job["batch"]]
                    engine.generate(
                        input_ids=chunk,
                        sampling_params=[dict(sampling) for _ in chunk],
                        # the same in every server: a peer that compares request ids too should find them equal
                        rid=[f"bench-{start + number}" for number in range(len(chunk))],
                    )
                connection.send("answered")
    finally:
        engine.shutdown()


if __name__ == "__main__":  # SGLang spawns processes that import this module again
    main()
