"""The process that `record` starts: SGLang's own HTTP server.

Its job has `server_args` (SGLang's own command line), `port` and `key`.
"""

from __future__ import annotations

import os
from typing import Any

from eagle_trace_serving.launching import take_job

#: what a user's own arguments may say, and a server that only `record` asks does without
_PLAIN: dict[str, Any] = {
    "host": "127.0.0.1",
    "tokenizer_worker_num": 1,
    "enable_http2": False,
    "enable_ssl_refresh": False,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "fastapi_root_path": "",
    "grpc_mode": False,
    "smg_grpc_mode": False,
    "encoder_only": False,
    "use_ray": False,
}


def main() -> None:
    """Serve the job named on the command line until standard input ends."""
    job = take_job(_end)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args(job["server_args"])
    plain = _PLAIN | {"port": job["port"], "api_key": job["key"], "admin_api_key": job["key"]}
    for name, value in plain.items():
        if hasattr(server_args, name):
            setattr(server_args, name, value)
    try:
        launch_server(server_args)
    finally:
        _end_children()


def _end() -> None:
    _end_children()
    os._exit(0)


def _end_children() -> None:
    from sglang.srt.utils.common import kill_process_tree

    # what a recording still holds is sealed before that (`arming`)
    kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":  # SGLang spawns processes that import this module again
    main()
