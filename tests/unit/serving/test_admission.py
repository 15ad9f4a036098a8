"""Which requests a recording takes, and what the environment of a server may ask for."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_trace.errors import UsageError
from eagle_trace.prompts import content_key
from eagle_trace_serving.admission import DEFAULT_REQUESTS, Admission, Admitted
from eagle_trace_serving.attached import CEILING, ceiling_of, opted_in, order_of


def take(admission: Admission, *rids: str) -> Admitted:
    admitted = Admitted(admission)
    for rid in rids:
        admitted.take(rid, [1, 2, 3])
    return admitted


def test_the_next_requests_are_taken_and_no_more() -> None:
    admitted = take(Admission(requests=2), "a", "b", "c")
    assert admitted.ids == {"a": 0, "b": 1}
    assert admitted.full
    assert not admitted.done
    admitted.ended |= {"a", "b"}
    assert admitted.done


def test_named_requests_keep_their_number_and_key() -> None:
    admitted = take(Admission({"x-1": (1, "second"), "x-0": (0, "first")}), "y", "x-1", "x-0")
    assert admitted.ids == {"x-1": 1, "x-0": 0}
    assert [admitted.key(rid) for rid in ("x-1", "x-0")] == ["second", "first"]


def test_keys_are_those_of_the_same_tokens_in_a_prompts_file() -> None:
    admitted = take(Admission(requests=3), "a", "b", "c")
    key = content_key("input_ids", [1, 2, 3])
    assert [admitted.key(rid) for rid in ("c", "a", "b")] == [f"{key}#3", key, f"{key}#2"]


def test_a_request_is_taken_once() -> None:
    assert take(Admission(requests=5), "a", "a").ids == {"a": 0}


def test_probes_of_the_server_itself_are_told_apart() -> None:
    from types import SimpleNamespace

    from eagle_trace_sglang.batches import is_probe

    assert is_probe(SimpleNamespace(rid="HEALTH_CHECK_17"))
    assert not any(is_probe(SimpleNamespace(rid=rid)) for rid in ("mine", 7, None, ["HEALTH_CHECK"]))


def test_ids_are_chosen_by_pattern() -> None:
    assert list(take(Admission(match="eval-*"), "eval-1", "chat-1", "eval-2").ids) == ["eval-1", "eval-2"]


@settings(deadline=None)
@given(
    st.text("ab*", max_size=8).filter(lambda text: text),
    st.text("ab-", max_size=12),
)
def test_a_star_stands_for_any_text_and_all_else_for_itself(pattern: str, rid: str) -> None:
    form = ".*".join(map(re.escape, pattern.split("*")))
    assert Admission(match=pattern).wants(rid) == bool(re.fullmatch(form, rid))


@pytest.mark.parametrize("pattern", ["*a" * 100 + "*b", "*" * 256, "*ab" * 80 + "*c"])
@pytest.mark.parametrize("rid", ["a" * 1024, "ab" * 512, "a" * 10_000_000], ids=["a", "ab", "endless"])
def test_no_pattern_and_no_request_id_keeps_the_scheduler_busy(pattern: str, rid: str) -> None:
    admission = Admission(match=pattern)
    started = time.thread_time()
    for _ in range(10):
        admission.wants(rid)
    assert time.thread_time() - started < 0.1, "10 ms each is a hundred times what it takes"


@pytest.mark.parametrize("rid", ["\ud800", "a\udfff-1", 5, None, ["a"], b"a"], ids=repr)
@pytest.mark.parametrize("admission", [Admission(), Admission(match="*"), Admission({"a": (0, "k")})], ids=repr)
def test_an_id_that_is_no_text_is_none_to_record_and_ends_no_recording(admission: Admission, rid: object) -> None:
    assert not Admitted(admission).take(rid, [1])  # type: ignore[arg-type]


def test_digest_and_text_of_a_long_prompt_are_left_to_the_writers_thread() -> None:
    class Tokens(list[int]):
        def __iter__(self) -> Iterator[int]:
            looked.append(threading.current_thread().name)
            return super().__iter__()

    looked: list[str] = []
    admitted = Admitted(Admission(requests=1))
    assert admitted.take("a", Tokens([1, 2, 3]))
    assert not looked
    assert admitted.key("a") == content_key("input_ids", [1, 2, 3])
    assert looked


def test_a_sample_takes_its_share_and_the_same_one_everywhere() -> None:
    rids = [f"request-{number}" for number in range(2000)]
    first, second = (take(Admission(sample=0.1), *rids) for _ in range(2))
    assert first.ids == second.ids
    assert 150 < len(first.ids) < 250


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"match": "^(a+)+$"}, "regular expression"),
        ({"match": "a" * 300}, "at most 256"),
        ({"sample": 0.0}, "share"),
        ({"requests": 0}, "1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Admission(**options)  # type: ignore[arg-type]


def test_a_folder_is_enough_to_record_the_next_requests() -> None:
    order = order_of({"EAGLE_TRACE_OUT": "dir", "PATH": "/bin"})
    assert order is not None
    assert order.out == "dir"
    assert order.admission.requests == DEFAULT_REQUESTS
    assert order.level == "values"
    assert order.alone


def test_the_environment_says_what_to_record() -> None:
    given = {
        "OUT": "d", "REQUESTS": "3", "MATCH": "e*", "SAMPLE": "0.5", "LEVEL": "stats", "MAX_BYTES": "2GB",
        "SECONDS": "60", "SITES": "fc.*", "ROOTS": "0:8", "STEPS": "0", "KEEP_CUDA_GRAPHS": "1",
    }  # fmt: skip
    order = order_of({f"EAGLE_TRACE_{name}": value for name, value in given.items()})
    assert order is not None
    assert order.admission == Admission(None, 3, "e*", 0.5)
    assert (order.level, order.max_bytes, order.seconds, order.keep_cuda_graphs) == ("stats", 2 * 10**9, 60.0, True)
    assert order.selection.wants("fc.out")
    assert not order.selection.wants("norm")


def test_a_server_may_wait_to_be_told() -> None:
    assert order_of({"EAGLE_TRACE_OUT": "dir", "EAGLE_TRACE_REQUESTS": "0"}) is None


@pytest.mark.parametrize("name", ["REQUESTS", "SAMPLE", "MAX_BYTES", "LEVEL", "ROOTS"])
def test_a_variable_that_makes_no_sense_is_named(name: str) -> None:
    with pytest.raises(UsageError):
        order_of({"EAGLE_TRACE_OUT": "dir", f"EAGLE_TRACE_{name}": "many"})


@pytest.mark.parametrize(
    ("said", "bytes_"), [(None, CEILING), ("", CEILING), ("many", CEILING), ("500MB", 500 * 10**6)]
)
def test_the_budget_of_the_server_is_the_most_that_a_client_may_ask_for(said: str | None, bytes_: int) -> None:
    assert ceiling_of({} if said is None else {"EAGLE_TRACE_MAX_BYTES": said}) == bytes_


def test_others_are_recorded_without_a_key_only_if_that_was_said() -> None:
    assert [said for said in ("1", "true", " YES ", "", "0", "no", "false", "off", "2", "never") if opted_in(
        {"EAGLE_TRACE_RECORD_OTHERS": said}
    )] == ["1", "true", " YES "]  # fmt: skip
    assert not opted_in({})
