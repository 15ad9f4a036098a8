"""The requests that vLLM's scheduler announces to a worker, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_trace_serving.chains import AnnouncedRequest
from eagle_trace_serving.recorder import ServeRecorder
from eagle_trace_vllm.asking import request_id


@dataclass
class Asked(AnnouncedRequest):
    """A request, with vLLM's `SamplingParams`."""

    sampling: Any = None

    def cut(self) -> tuple[list[int], str | None]:
        """Its answer, and why it ended: vLLM cuts it in another process, by the rules that are its own."""
        said, sampling = list(self.sampled), self.sampling
        stops = {sampling.eos_token_id, *(sampling.stop_token_ids or ())}
        least = sampling.min_tokens or 0
        end = next((n + 1 for n, token in enumerate(said) if token in stops and n + 1 > least), None)
        most = min(sampling.max_tokens or self.longest, self.longest - len(self.prompt_ids))
        if end is not None and end <= most:
            return said[:end], "stop"
        if len(said) >= most:
            return said[:most], "length"
        # by a text to stop at, which a worker does not see, or by whoever gave it up
        return said, ("stop" if sampling.stop else "abort") if self.ended else None


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
                request = Asked(
                    request_id(new.req_id), new.prompt_token_ids, self._longest, sampling=new.sampling_params
                )
                self._requests[new.req_id] = request
                self._recorder.arrived(request)
        for name, count in scheduled.num_scheduled_tokens.items():
            if (request := self._requests.get(name)) is not None:
                request.computed = int(before[name]) + int(count)
