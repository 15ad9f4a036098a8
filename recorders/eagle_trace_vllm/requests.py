"""The requests that vLLM's scheduler announces to a worker, step by step."""

from __future__ import annotations

from typing import Any

from eagle_trace_serving.recorder import ServeRecorder
from eagle_trace_vllm.asking import request_id
from eagle_trace_vllm.recording import Asked


class Announced:
    """Follows every request from its first step to the one after its last.

    Args:
        recorder: told of each.
        longest: tokens that prompt and answer may have together.
    """

    def __init__(self, recorder: ServeRecorder, longest: int) -> None:
        self._recorder, self._longest = recorder, longest
        self._requests: dict[str, Asked] = {}

    def step(self, scheduled: Any) -> None:
        """A step begins (vLLM's `SchedulerOutput`)."""
        for name in scheduled.finished_req_ids:
            if (request := self._requests.pop(name, None)) is not None:
                request.ended = True
                self._recorder.ended(request.rid)
        self._recorder.between_batches()
        cached = scheduled.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            before[new.req_id] = new.num_computed_tokens
            # runner V2 announces a request again that had to give up its memory; one of embeddings has no tokens
            if new.req_id not in self._requests and new.prompt_token_ids and new.sampling_params is not None:
                request = Asked(request_id(new.req_id), new.prompt_token_ids, new.sampling_params, self._longest)
                self._requests[new.req_id] = request
                self._recorder.arrived(request)
        for name, count in scheduled.num_scheduled_tokens.items():
            if (request := self._requests.get(name)) is not None:
                request.computed = int(before[name]) + int(count)
