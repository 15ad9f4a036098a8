"""The process that owns SGLang: started by `record`, told what to do over the session.

Run as ``python -m eagle_trace_sglang.engine JOB``, JOB being a JSON file with `server_args` (SGLang's own command
line) and `target`. Everything SGLang prints goes to this process's output, which `record` keeps in a file.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from eagle_trace.errors import EagleTraceError
from eagle_trace.prompts import Prompt, tokenize
from eagle_trace_sglang.session import connect


def _tokenizer(target: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None  # prompts given as input_ids need none; others are refused with a clear word


def _generate(
    engine: Any,
    connection: Connection,
    requests: list[tuple[str, list[int]]],
    batch: int,
    sampling: dict[str, Any],
) -> None:
    for start in range(0, len(requests), batch):
        chunk = requests[start : start + batch]
        answers = engine.generate(
            input_ids=[ids for _, ids in chunk],
            sampling_params=[dict(sampling) for _ in chunk],
            rid=[rid for rid, _ in chunk],
        )
        for (rid, _), answer in zip(chunk, answers, strict=True):
            meta = answer["meta_info"]
            spec = {
                key: value for key, value in meta.items() if key.startswith("spec_") and isinstance(value, int | float)
            }
            connection.send(("answer", rid, list(answer["output_ids"]), answer.get("text") or "", spec))
    connection.send(("answered",))


def _tokens(connection: Connection, tokenizer: Any, prompts: list[dict[str, Any]]) -> None:
    try:
        token_ids = [tokenize(Prompt(**prompt), tokenizer) for prompt in prompts]
    except EagleTraceError as error:
        connection.send(("refused", str(error)))
        return
    connection.send(("tokens", token_ids, [tokenizer.decode(ids) if tokenizer else "" for ids in token_ids]))


def main() -> None:
    """Serve the job named on the command line until told to stop."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    connection = connect("engine")
    if connection is None:
        raise SystemExit("eagle_trace_sglang.engine is started by `eagle-trace record --mode serve`, not by hand")
    import sglang
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(job["server_args"])
    tokenizer = _tokenizer(job["target"], server_args.trust_remote_code)
    engine = sglang.Engine(server_args=server_args)
    try:
        connection.send(("ready", {name: version(name) for name in ("sglang", "torch", "transformers", "numpy")}))
        while True:
            try:
                name, *arguments = connection.recv()
            except EOFError:
                return
            if name == "stop":
                return
            if name == "tokenize":
                _tokens(connection, tokenizer, *arguments)
            else:
                _generate(engine, connection, *arguments)
    finally:
        engine.shutdown()


if __name__ == "__main__":  # SGLang spawns processes that import this module again
    main()
