"""The process that owns SGLang: started by `record`, told what to do over the session.

Run as ``python -m eagle_trace_sglang.engine JOB``, JOB being a JSON file with `server_args` (SGLang's own command
line) and `target`. Everything SGLang prints goes to this process's output, which `record` keeps in a file.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from eagle_trace.errors import EagleTraceError, HostError
from eagle_trace.prompts import Prompt, tokenize
from eagle_trace_serving.control import Control
from eagle_trace_serving.requests import speculation
from eagle_trace_serving.session import connect

#: where the engine finds the `record` that started it
ENGINE = "EAGLE_TRACE_ENGINE"


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
        _control().raise_failure()
        for (rid, _), answer in zip(chunk, answers, strict=True):
            counts = speculation(answer["meta_info"])
            connection.send(("answer", rid, list(answer["output_ids"]), answer.get("text") or "", counts))
    connection.send(("answered",))


def _tokens(connection: Connection, tokenizer: Any, prompts: list[dict[str, Any]]) -> None:
    try:
        token_ids = [tokenize(Prompt(**prompt), tokenizer) for prompt in prompts]
    except EagleTraceError as error:
        connection.send(("refused", str(error)))
        return
    connection.send(("tokens", token_ids))


def main() -> None:
    """Serve the job named on the command line until told to stop."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    connection = connect("engine", ENGINE)
    if connection is None:
        raise SystemExit("eagle_trace_sglang.engine is started by `eagle-trace record --mode serve`, not by hand")
    import sglang
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(job["server_args"])
    tokenizer = _tokenizer(job["target"], server_args.trust_remote_code)
    engine = sglang.Engine(server_args=server_args)
    try:
        try:
            connection.send(("ready", _control().wait_until_armed()[0]))
        except EagleTraceError as error:
            connection.send(("failed", str(error), ""))
            return
        while True:
            try:
                name, *arguments = connection.recv()
            except EOFError:
                return
            if name == "stop":
                return
            try:
                _obey(engine, connection, tokenizer, name, arguments)
            except EagleTraceError as error:
                connection.send(("failed", str(error), ""))
    finally:
        engine.shutdown()


def _obey(engine: Any, connection: Connection, tokenizer: Any, name: str, arguments: list[Any]) -> None:
    if name == "tokenize":
        _tokens(connection, tokenizer, *arguments)
    elif name == "begin":
        _control().start(*arguments)
        connection.send(("recording",))
    elif name == "finish":
        _control().finish(*arguments)
        connection.send(("sealed",))
    else:
        _generate(engine, connection, *arguments)


def _control() -> Control:
    from eagle_trace_serving.attached import control

    found = control()
    if found is None:
        raise HostError(
            "SGLang started without the plugin `eagle_trace`: is eagle-trace installed beside SGLang, "
            "and does SGLANG_PLUGINS leave it out?"
        )
    return found


if __name__ == "__main__":  # SGLang spawns processes that import this module again
    main()
