"""Arming SGLang's main process: the places of it that say when it serves, is ready, and ends."""

from __future__ import annotations

from typing import Any

from eagle_trace_serving import attached

HTTP_SERVER = "sglang.srt.entrypoints.http_server"


def arm() -> None:
    """Make this process's control, before SGLang starts its scheduler processes, and hook what says it is ready."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from eagle_trace_sglang.host import HOST

    armed = attached.arm(HOST)

    def serving(server_args: Any, *_args: Any, **_kwargs: Any) -> None:
        from sglang.srt.entrypoints.http_server import app
        from sglang.srt.utils.auth import AuthLevel, auth_level

        # a server whose keys are not known (AttributeError) must not be taken for one that has none
        keys = [server_args.api_key], server_args.admin_api_key
        # SGLang finds the level on the endpoint of a route of the app itself, and not below a router
        armed.add_routes(app, *keys, auth_level(AuthLevel.ADMIN_OPTIONAL))

    HookRegistry.register(f"{HTTP_SERVER}._setup_and_run_http_server", serving, HookType.BEFORE)
    # the server's own warm-up requests are over: whatever comes now is somebody's
    HookRegistry.register(f"{HTTP_SERVER}._wait_and_warmup", armed.ready, HookType.AFTER)
    # an Engine loads its plugins from inside its constructor, which is too late to be told of its end
    for name in ("generate", "async_generate"):
        HookRegistry.register(f"sglang.srt.entrypoints.engine.Engine.{name}", armed.ready, HookType.BEFORE)
    HookRegistry.register("sglang.srt.utils.common.kill_process_tree", armed.ending, HookType.BEFORE)
