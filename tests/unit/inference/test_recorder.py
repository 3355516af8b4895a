from __future__ import annotations

import math
from typing import Any

import pytest
from toy import END, ToyTokenizer

from hpcrl.errors import DataError, InfraError
from hpcrl.inference.recorder import Call, Recorder, Sampled, Session
from hpcrl.inference.tokens import Dialogue
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.record import AttemptRecord


class Talk:
    """A session and the shortest way to speak in it."""

    def __init__(self) -> None:
        tokenizer = ToyTokenizer()
        self.tokenizer = tokenizer
        self.dialogue = Dialogue(tokenizer, tokenizer.end_ids)
        self.session = Session("a0", now=0.0)

    def begin(self, messages: list[dict[str, Any]]) -> Call:
        return self.session.begin(self.dialogue, messages, Sampling(), now=2.0, began_at=1.0)

    def end(self, call: Call, reply: str) -> list[dict[str, Any]]:
        ids = [*map(ord, reply), END]
        sampled = Sampled(ids, [-0.5] * len(ids), [(0, len(ids), "0.1")], reply)
        asked = call.messages
        self.session.finish(call, sampled, "stop", now=5.0)
        return [*asked, {"role": "assistant", "content": reply}]

    def record(self) -> AttemptRecord:
        return AttemptRecord.model_validate_json(self.session.record(9.0))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_two_turns_are_one_segment_with_only_sampled_tokens_in_the_mask() -> None:
    talk = Talk()
    first = talk.end(talk.begin([user("q")]), "ab")
    talk.end(talk.begin([*first, user("r")]), "c")
    record = talk.record()
    assert record.segments == [0]
    assert len(record.token_ids) == len(record.logprobs) == len(record.loss_mask)
    assert [(r.start, r.end) for r in record.requests] == [(s.start, s.end) for s in record.version_spans]
    trained = [token for token, mask in zip(record.token_ids, record.loss_mask, strict=True) if mask]
    assert trained == [ord("a"), ord("b"), END, ord("c"), END]
    assert all((value == -0.5) == (mask == 1) for value, mask in zip(record.logprobs, record.loss_mask, strict=True))
    text = talk.tokenizer.decode(record.token_ids)
    assert text == talk.tokenizer.render(record.messages, False).removesuffix("\n")
    request = record.requests[1]
    assert (request.started_at, request.queue_s, request.generate_s) == (1.0, 1.0, 3.0)
    assert request.prompt_tokens == request.start


def test_edited_history_begins_a_segment() -> None:
    talk = Talk()
    talk.end(talk.begin([user("q")]), "ab")
    talk.end(talk.begin([user("summary")]), "c")
    record = talk.record()
    assert len(record.segments) == 2
    assert record.token_ids[record.segments[1] :][:1] == talk.tokenizer.encode("<|im_start|>")
    assert [request.segment for request in record.requests] == [0, 1]
    assert sum(record.loss_mask) == 5


def test_interleaved_contexts_both_extend() -> None:
    talk = Talk()
    main = talk.end(talk.begin([user("main")]), "m")
    sub = talk.end(talk.begin([user("sub")]), "s")
    talk.end(talk.begin([*main, user("more")]), "n")
    talk.end(talk.begin([*sub, user("more")]), "t")
    record = talk.record()
    assert len(record.segments) == 2
    assert [request.segment for request in record.requests] == [0, 1, 0, 1]
    for request in record.requests:
        assert all(record.loss_mask[request.start : request.end])


def test_parallel_calls_on_one_context_do_not_mix() -> None:
    talk = Talk()
    first = talk.end(talk.begin([user("q")]), "ab")
    one = talk.begin([*first, user("r")])
    two = talk.begin([*first, user("r")])
    assert one.prompt.extends
    assert not two.prompt.extends
    talk.end(two, "x")
    talk.end(one, "y")
    record = talk.record()
    assert len(record.segments) == 2
    assert sum(record.loss_mask) == 3 + 2 + 2


def test_a_failed_call_adds_no_tokens_and_the_context_goes_on() -> None:
    talk = Talk()
    first = talk.end(talk.begin([user("q")]), "ab")
    cancelled = talk.begin([*first, user("r")])
    talk.session.fail(cancelled, "client_cancelled", now=4.0)
    again = talk.begin([*first, user("r")])
    assert again.prompt.extends
    talk.end(again, "c")
    record = talk.record()
    assert [request.ending for request in record.requests] == ["stop", "client_cancelled", "stop"]
    assert record.requests[1].start == record.requests[1].end
    assert sum(record.loss_mask) == 5


def test_only_failed_calls_give_an_empty_record() -> None:
    talk = Talk()
    talk.session.fail(talk.begin([user("q")]), "error", now=4.0)
    record = talk.record()
    assert (record.token_ids, record.segments, record.messages) == ([], [], [])
    assert record.requests[0].segment == 0


@pytest.mark.parametrize(
    "sampled",
    [
        Sampled([1, 2], [-0.1], [(0, 2, "0.1")], "x"),
        Sampled([1], [math.nan], [(0, 1, "0.1")], "x"),
        Sampled([1, 2], [-0.1, -0.2], [(0, 1, "0.1")], "x"),
        Sampled([1, 2], [-0.1, -0.2], [(0, 1, "0.1"), (0, 2, "0.1")], "x"),
        Sampled([1], [-0.1], [], "x"),
    ],
)
def test_inconsistent_samples_spoil_the_record(sampled: Sampled) -> None:
    talk = Talk()
    with pytest.raises(DataError):
        talk.session.finish(talk.begin([user("q")]), sampled, "stop", now=4.0)
    with pytest.raises(DataError):
        talk.session.record(9.0)


def test_the_record_closes_the_session_and_repeats() -> None:
    talk = Talk()
    talk.end(talk.begin([user("q")]), "ab")
    assert talk.session.record(9.0) == talk.session.record(10.0)
    with pytest.raises(InfraError, match="attempt_closed"):
        talk.begin([user("again")])


def test_a_record_waits_for_running_calls() -> None:
    talk = Talk()
    talk.begin([user("q")])
    with pytest.raises(DataError, match="calls_running"):
        talk.session.record(9.0)


def test_sessions_are_released() -> None:
    recorder = Recorder(keep_s=10.0, idle_s=100.0)
    closed = recorder.session("closed", 0.0)
    closed.record(0.0)
    recorder.session("idle", 0.0)
    assert recorder.session("closed", 9.0) is closed
    recorder.session("new", 50.0)
    assert recorder.find("closed") is None
    assert recorder.find("idle") is not None
    recorder.session("newer", 101.0)
    assert recorder.find("idle") is None
    assert len(recorder) == 2


def test_a_released_attempt_stays_over() -> None:
    recorder = Recorder(keep_s=10.0, idle_s=100.0)
    recorder.session("closed", 0.0).record(0.0)
    recorder.session("other", 50.0)
    assert recorder.is_over("closed") and not recorder.is_over("other")
    with pytest.raises(InfraError, match="attempt_closed"):
        recorder.session("closed", 51.0)


def test_an_ended_call_holds_no_dialogue() -> None:
    """Each call's prompt is its whole history: held to the attempt's end, memory would grow with the square of the turns."""
    talk, messages = Talk(), [user("q")]
    calls = []
    for turn in range(20):
        calls.append(talk.begin(messages))
        messages = [*talk.end(calls[-1], "ab"), user("r")]
        if turn == 9:
            failed = talk.begin(messages)
            talk.session.fail(failed, "error", now=4.0)
            calls.append(failed)
    assert all(not call.messages and not call.prompt.token_ids and not call.prompt.text for call in calls)
    assert [call.prompt_tokens for call in calls] == [request.prompt_tokens for request in talk.record().requests]
    assert calls[-1].prompt_tokens > 300
