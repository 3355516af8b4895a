from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from toy import END, ToyTokenizer

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import ModelSection, RolloutSection, TasksSection
from hpcrl.errors import DataError, InfraError
from hpcrl.inference.messages import parse_tools
from hpcrl.inference.proxy import Proxy
from hpcrl.inference.supervisor import Generated, TokenSpan
from hpcrl.protocol.keys import AttemptKey, Pin, records_key, sign_attempt_key
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.record import AttemptRecord

SECRET = "s"
USER = {"role": "user", "content": "x"}
CONFIG = RunConfig(
    model=ModelSection(path="m"),
    tasks=TasksSection(train="t"),
    rollout=RolloutSection(context_tokens=100, max_tokens=20, temperature=0.7),
)


class FakeEngine:
    """Replies with fixed ids; remembers what it was asked."""

    def __init__(self, reply: str = "hello", version: str = "0.1") -> None:
        self.served_version = version
        self.sampled_by = [version]
        self.ids = [*map(ord, reply), END]
        self.finish_reason = "stop"
        self.error: InfraError | DataError | None = None
        self.asked: list[tuple[list[int], Sampling, list[int], dict[str, Any]]] = []
        self.hold: asyncio.Event | None = None
        self.closed: asyncio.Event | None = None
        self.cancelled = 0

    async def until_serving(self) -> None:
        if self.closed is not None:
            await self.closed.wait()
        if self.error is not None and self.error.reason == "queue_timeout":
            raise self.error

    def version_for(self, key: AttemptKey) -> str | None:
        return self.served_version if key.allows(self.served_version) else None

    async def generate(
        self, version: str, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], **more: Any
    ) -> Generated:
        self.asked.append((token_ids, sampling, stop_token_ids, more))
        if self.error is not None:
            raise self.error
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        count = len(self.ids)
        edges = [count * part // len(self.sampled_by) for part in range(len(self.sampled_by) + 1)]
        spans = [TokenSpan(a, b, v) for a, b, v in zip(edges, edges[1:], self.sampled_by, strict=False)]
        return Generated(self.ids, [-0.1] * count, self.finish_reason, spans)


class Bench:
    """A proxy, its engine, and a client in the same loop."""

    def __init__(self, engine: FakeEngine, client: httpx.AsyncClient, proxy: Proxy) -> None:
        self.engine, self.client, self.proxy = engine, client, proxy

    async def chat(
        self,
        messages: list[dict[str, Any]],
        attempt: str = "a0",
        pin: Pin = "trajectory",
        idempotency: str | None = None,
        **more: Any,
    ) -> httpx.Response:
        return await self.post("chat/completions", {"messages": messages, **more}, attempt, pin, idempotency)

    async def post(
        self, path: str, body: Any, attempt: str = "a0", pin: Pin = "trajectory", idempotency: str | None = None
    ) -> httpx.Response:
        key = sign_attempt_key(SECRET, AttemptKey(attempt, "0.1", "r0", pin))
        headers = {"Authorization": f"Bearer {key}"} | ({"Idempotency-Key": idempotency} if idempotency else {})
        return await self.client.post(f"/v1/{path}", json=body, headers=headers)

    async def record(self, attempt: str = "a0") -> AttemptRecord:
        return AttemptRecord.model_validate((await self.fetch(attempt)).json())

    def says(self, reply: str, finish_reason: str = "stop") -> None:
        self.engine.ids = [*map(ord, reply), *([END] if finish_reason == "stop" else [])]
        self.engine.finish_reason = finish_reason

    async def fetch(self, attempt: str = "a0") -> httpx.Response:
        key = records_key(SECRET)
        return await self.client.post(
            "/side/record", json={"attempt_id": attempt}, headers={"Authorization": f"Bearer {key}"}
        )


ROOMY = CONFIG.model_copy(
    update={
        "rollout": CONFIG.rollout.model_copy(update={"context_tokens": 1000}),
        "sandbox": CONFIG.sandbox.model_copy(update={"output_bytes": 100}),
    }
)


def bench(scenario: Callable[[Bench], Awaitable[None]], config: RunConfig = CONFIG, **engine: Any) -> None:
    async def run() -> None:
        fake = FakeEngine(**engine)
        proxy = Proxy(config, SECRET, "r0", fake, ToyTokenizer())
        transport = httpx.ASGITransport(app=proxy.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            await scenario(Bench(fake, client, proxy))

    asyncio.run(run())


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_call_is_answered_in_openai_shape_and_recorded() -> None:
    async def scenario(b: Bench) -> None:
        answer = (await b.chat([USER])).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "token_ids" not in str(answer)
        _, sampling, stop_ids, _ = b.engine.asked[0]
        assert (sampling.temperature, sampling.max_tokens) == (0.7, 20)
        assert END in stop_ids
        messages = [USER, answer["choices"][0]["message"], USER]
        await b.chat(messages)
        record = AttemptRecord.model_validate((await b.fetch()).json())
        assert record.segments == [0]
        assert sum(record.loss_mask) == 2 * len(b.engine.ids)
        assert [r.request_id for r in record.requests] == ["a0-q0", "a0-q1"]
        assert record.messages[:3] == messages
        assert (await b.fetch()).json() == record.model_dump()
        assert code(await b.chat(messages)) == (409, "attempt_closed")
        assert b.proxy.stats.endings["stop"] == 2

    bench(scenario)


def test_max_tokens_is_fitted_to_the_context() -> None:
    async def scenario(b: Bench) -> None:
        prompt = len(ToyTokenizer().encode(ToyTokenizer().render([{"role": "user", "content": ""}], True)))
        long = {"role": "user", "content": "x" * (100 - prompt - 3)}
        await b.chat([long])
        assert b.engine.asked[0][1].max_tokens == 3
        full = {"role": "user", "content": "x" * (100 - prompt)}
        assert code(await b.chat([full])) == (400, "context_length_exceeded")
        assert len(b.engine.asked) == 1
        record = AttemptRecord.model_validate((await b.fetch()).json())
        assert [r.ending for r in record.requests] == ["stop", "truncated"]
        assert record.requests[0].sampling.max_tokens == 3

    bench(scenario)


def test_versions_outside_the_bound_are_refused() -> None:
    async def scenario(b: Bench) -> None:
        b.engine.sampled_by = ["0.2"]
        assert code(await b.chat([USER])) == (409, "stale_version")
        record = AttemptRecord.model_validate((await b.fetch()).json())
        assert record.token_ids == []
        assert record.requests[0].ending == "abort"
        b.engine.served_version = "0.2"
        assert code(await b.chat([USER], attempt="a1")) == (409, "stale_version")
        assert len(b.engine.asked) == 1

    bench(scenario)


def test_under_pin_token_a_reply_may_be_of_several_versions_from_the_bound_one_on() -> None:
    async def scenario(b: Bench) -> None:
        b.engine.sampled_by = ["0.1", "0.2", "0.4"]
        answer = (await b.chat([USER], pin="token")).json()["choices"][0]["message"]
        b.engine.served_version, b.engine.sampled_by = "0.4", ["0.4"]
        assert (await b.chat([USER, answer, USER], pin="token")).status_code == 200
        record = AttemptRecord.model_validate((await b.fetch()).json())
        start, n = record.requests[0].start, len(b.engine.ids)
        first = [(span.start - start, span.end - start, span.version) for span in record.version_spans[:3]]
        assert first == [(0, n // 3, "0.1"), (n // 3, 2 * n // 3, "0.2"), (2 * n // 3, n, "0.4")]
        assert record.version_spans[3].version == "0.4"
        for outside in (["0.1", "0.0"], ["1.2"], ["none"]):
            b.engine.sampled_by = outside
            assert code(await b.chat([USER], attempt="a1", pin="token")) == (409, "stale_version")

    bench(scenario)


def test_under_pin_turn_each_reply_is_of_one_version() -> None:
    async def scenario(b: Bench) -> None:
        answer = (await b.chat([USER], pin="turn")).json()["choices"][0]["message"]
        b.engine.served_version, b.engine.sampled_by = "0.2", ["0.2"]
        assert (await b.chat([USER, answer, USER], pin="turn")).status_code == 200
        b.engine.sampled_by = ["0.1", "0.2"]
        assert code(await b.chat([USER], pin="turn")) == (409, "stale_version")
        record = AttemptRecord.model_validate((await b.fetch()).json())
        assert [span.version for span in record.version_spans] == ["0.1", "0.2"]
        assert [request.ending for request in record.requests] == ["stop", "stop", "abort"]

    bench(scenario)


def test_endings_of_failed_calls() -> None:
    async def scenario(b: Bench) -> None:
        b.engine.finish_reason = "abort"
        assert code(await b.chat([USER])) == (409, "stale_version")
        b.engine.finish_reason = "error"
        assert code(await b.chat([USER])) == (503, "engine_failed")
        b.engine.error = InfraError("generation_timeout", "slow")
        assert code(await b.chat([USER])) == (503, "generation_timeout")
        b.engine.error = InfraError("engine_unreachable", "dead")
        assert code(await b.chat([USER])) == (503, "engine_unreachable")
        b.engine.error = InfraError("queue_timeout", "flip")
        assert code(await b.chat([USER])) == (503, "queue_timeout")
        record = AttemptRecord.model_validate((await b.fetch()).json())
        assert [r.ending for r in record.requests] == ["abort", "error", "generation_timeout", "error", "queue_timeout"]

    bench(scenario)


def test_taking_the_record_cancels_what_still_generates() -> None:
    async def scenario(b: Bench) -> None:
        b.engine.hold = asyncio.Event()
        call = asyncio.create_task(b.chat([USER]))
        while not b.engine.asked:
            await asyncio.sleep(0)
        record = AttemptRecord.model_validate((await b.fetch()).json())
        assert [r.ending for r in record.requests] == ["client_cancelled"]
        assert (await call).status_code == 499
        assert b.engine.cancelled == 1
        assert b.proxy.active_requests == 0

    bench(scenario)


def test_stop_texts_cut_the_reply_but_not_the_record() -> None:
    async def scenario(b: Bench) -> None:
        answer = (await b.chat([USER], stop=["lo"])).json()
        assert answer["choices"][0]["message"]["content"] == "hel"
        assert b.engine.asked[0][3] == {"stop": ["lo"]}
        record = AttemptRecord.model_validate((await b.fetch()).json())
        assert sum(record.loss_mask) == len(b.engine.ids)

    bench(scenario)


def test_keys() -> None:
    async def scenario(b: Bench) -> None:
        wrong_replica = sign_attempt_key(SECRET, AttemptKey("a0", "0.1", "r1"))
        forged = sign_attempt_key("other", AttemptKey("a0", "0.1", "r0"))
        worker = records_key(SECRET)
        found = []
        for key in (wrong_replica, forged, worker, ""):
            answer = await b.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            found.append(answer.status_code)
        assert found == [403, 401, 401, 401]
        assert code(await b.client.post("/side/record", json={"attempt_id": "a0"})) == (401, "bad_key")
        assert code(await b.fetch("never")) == (404, "unknown_attempt")
        assert (await b.client.get("/health")).json() == {"status": "serving", "version": "0.1"}

    bench(scenario)


def test_other_paths_and_methods_are_told_what_there_is() -> None:
    async def scenario(b: Bench) -> None:
        for method, path, status in (
            ("POST", "/v1/responses", 404),
            ("POST", "/chat/completions", 404),
            ("GET", "/v1/completions", 405),
        ):
            answer = await b.client.request(method, path)
            assert code(answer) == (status, "unknown_route")
            message = answer.json()["error"]["message"]
            assert f"{method} {path} is not served" in message and "POST /v1/chat/completions" in message

    bench(scenario)


TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'


def test_tool_calls_are_parsed_recorded_and_continued_token_exactly() -> None:
    async def scenario(b: Bench) -> None:
        b.says("Look." + CALL)
        choice = (await b.chat([USER], tools=[TOOL])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
        assert choice["message"]["content"] == "Look."
        b.says("done")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sol.py"}
        last = (await b.chat([USER, choice["message"], result], tools=[TOOL])).json()["choices"][0]
        assert last["message"] == {"role": "assistant", "content": "done"}
        record = await b.record()
        assert record.segments == [0]
        assert [request.ending for request in record.requests] == ["tool_calls", "stop"]
        assert [request.opens for request in record.requests] == ["first", None]
        assert record.requests[0].tool_calls[0].name == "bash"
        first = record.requests[0]
        assert record.token_ids[first.start : first.end] == [*map(ord, "Look." + CALL), END]

    bench(scenario, ROOMY)


def test_a_call_cut_by_length_is_no_call_even_after_a_complete_one() -> None:
    async def scenario(b: Bench) -> None:
        b.says(CALL + '<tool_call>{"na', "length")
        choice = (await b.chat([USER], tools=[TOOL])).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert "tool_calls" not in choice["message"]
        b.says(CALL, "length")
        assert "tool_calls" not in (await b.chat([USER], tools=[TOOL])).json()["choices"][0]["message"]
        assert all(not request.tool_calls for request in (await b.record()).requests)

    bench(scenario, ROOMY)


def test_without_tools_nothing_is_parsed() -> None:
    async def scenario(b: Bench) -> None:
        b.says(CALL)
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            choice = (await b.chat([USER], **more)).json()["choices"][0]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL)

    bench(scenario)


def test_a_long_tool_result_is_cut_by_the_shared_rule_before_it_is_tokenised() -> None:
    async def scenario(b: Bench) -> None:
        long = "h" * 600 + "t" * 600
        history = [USER, {"role": "assistant", "content": "r"}, {"role": "tool", "tool_call_id": "c", "content": long}]
        reply = (await b.chat(history)).json()["choices"][0]["message"]
        shown = ToyTokenizer().decode(b.engine.asked[0][0])
        assert "h" * 50 + "\n[... 1100 bytes omitted ...]\n" + "t" * 50 in shown
        await b.chat([*history, reply, USER])
        record = await b.record()
        assert record.segments == [0]
        assert [request.opens for request in record.requests] == ["first", None]

    bench(scenario, ROOMY)


def test_a_spoiled_answer_spoils_that_attempt_only() -> None:
    async def scenario(b: Bench) -> None:
        b.engine.error = DataError("engine_answer", "a sampled token has no finite logprob")
        assert code(await b.chat([USER])) == (422, "engine_answer")
        b.engine.error = None
        assert (await b.chat([USER])).status_code == 200
        assert (await b.chat([USER], attempt="a1")).status_code == 200
        assert code(await b.fetch("a0")) == (422, "engine_answer")
        assert (await b.record("a1")).requests[0].ending == "stop"

    bench(scenario)


def test_the_same_idempotency_key_gets_the_recorded_answer() -> None:
    async def scenario(b: Bench) -> None:
        first = await b.chat([USER], idempotency="k1")
        again = await b.chat([USER], idempotency="k1")
        assert first.json() == again.json()
        assert len(b.engine.asked) == 1
        assert code(await b.chat([USER, USER], idempotency="k1")) == (422, "idempotency_key_reused")
        assert (await b.chat([USER], attempt="a1", idempotency="k1")).json()["id"] == "a1-q0"
        assert len((await b.record()).requests) == 1

    bench(scenario)


def test_a_cancelled_attempt_generates_nothing_any_more() -> None:
    async def scenario(b: Bench) -> None:
        b.engine.hold = asyncio.Event()
        b.engine.closed = asyncio.Event()
        waiting = asyncio.create_task(b.chat([USER]))  # at the gate
        await asyncio.sleep(0.01)
        b.engine.closed = None
        generating = asyncio.create_task(b.chat([USER]))
        while not b.engine.asked:
            await asyncio.sleep(0)
        assert b.proxy.attempts_under_way == ["a0"]
        await b.proxy.cancel("a0")
        assert [(await call).status_code for call in (waiting, generating)] == [499, 499]
        assert b.engine.cancelled == 1
        assert b.proxy.active_requests == 0
        assert b.proxy.attempts_under_way == []
        assert code(await b.chat([USER])) == (409, "attempt_closed")
        assert [request.ending for request in (await b.record()).requests] == ["client_cancelled", "client_cancelled"]

    bench(scenario)


def test_a_stream_is_recorded_like_any_other_call() -> None:
    async def scenario(b: Bench) -> None:
        answer = await b.chat([USER], stream=True, stream_options={"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert '"content": "hello"' in answer.text and '"total_tokens"' in lines[-2]
        record = await b.record()
        assert record.token_ids[record.requests[0].start :] == b.engine.ids

    bench(scenario)


def test_text_completions_continue_what_they_begin_with() -> None:
    async def scenario(b: Bench) -> None:
        b.says("ab", "length")
        first = (await b.post("completions", {"prompt": "once "})).json()
        assert first["choices"][0]["text"] == "ab"
        await b.post("completions", {"prompt": "once ab and"})
        ids = [*map(ord, "once ab andab"), 7]
        await b.post("completions", {"prompt": ids})
        assert code(await b.post("completions", {"prompt": [1 << 30]})) == (400, "invalid_value")
        await b.post("completions", {"prompt": "twice"})
        record = await b.record()
        assert [request.opens for request in record.requests] == ["first", None, None, "history"]
        assert record.token_ids[: len(ids)] == ids
        assert record.loss_mask[: len(ids)] == [0] * 5 + [1, 1] + [0] * 4 + [1, 1] + [0]
        assert b.engine.asked[3][0] == [*map(ord, "twice")]

    bench(scenario)


def test_segments_say_why_they_were_opened() -> None:
    async def scenario(b: Bench) -> None:
        b.proxy._calls._dialogue._tokenizer.manner = "forget"  # type: ignore[attr-defined]
        b.says("<think>hm</think>a")
        reply = (await b.chat([USER])).json()["choices"][0]["message"]
        await b.chat([USER, reply, USER])
        await b.chat([{"role": "user", "content": "edited"}])
        assert [request.opens for request in (await b.record()).requests] == ["first", "template", "history"]

    bench(scenario)


def called(arguments: str) -> dict[str, Any]:
    """A message of the assistant with one tool call, as a client sends it."""
    function = {"name": "bash", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c0", "type": "function", "function": function}],
    }


ODD_ARGUMENTS = {
    "half a surrogate pair": '{"command": "\\ud800"}',
    "deep": '{"command": ' + "[" * 300 + "]" * 300 + "}",
    "beyond a double": '{"command": 1e999}',
    "long number": '{"command": ' + "9" * 4200 + "}",
}


@pytest.mark.parametrize("arguments", ODD_ARGUMENTS.values(), ids=ODD_ARGUMENTS)
def test_odd_arguments_of_tool_calls_harm_nobody(arguments: str) -> None:
    """Written by the model, then sent back as text within a JSON body, where no check of the body sees it."""

    async def scenario(b: Bench) -> None:
        b.says(f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>')
        choice = (await b.chat([USER], tools=[TOOL])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "no"}
        b.says("done")
        assert (await b.chat([USER, choice["message"], result], tools=[TOOL])).status_code == 200
        assert (await b.chat([USER, called(arguments), result], tools=[TOOL])).status_code == 200
        record = await b.record()
        assert [request.opens for request in record.requests] == ["first", None, "history"]

    roomy = ROOMY.model_copy(update={"rollout": ROOMY.rollout.model_copy(update={"context_tokens": 20_000})})
    bench(scenario, roomy)


def test_what_is_far_too_long_is_not_even_rendered() -> None:
    """Wherever the length is: texts, calls, tools, or the number of messages."""

    async def scenario(b: Bench) -> None:
        tokenizer = b.proxy._calls._dialogue._tokenizer
        before, long = tokenizer.renders, "x" * 50_000  # type: ignore[attr-defined]
        tool = {"type": "function", "function": {"name": "f", "description": long}}
        many = [{"role": "user", "content": ""}] * 5000
        requests: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
            ([{"role": "user", "content": long}], {}),
            ([USER, called(json.dumps({"command": long}))], {}),
            ([USER, {"role": "assistant", "content": "", "reasoning_content": long}], {}),
            ([USER], {"tools": [tool]}),
            (many, {}),
        ]
        for messages, more in requests:
            assert code(await b.chat(messages, **more)) == (400, "context_length_exceeded")
        assert tokenizer.renders == before  # type: ignore[attr-defined]
        assert code(await b.post("completions", {"prompt": [65] * 50_000})) == (400, "context_length_exceeded")
        assert (await b.chat([USER])).status_code == 200
        # A tool's result is cut before that: it does fit.
        result = {"role": "tool", "tool_call_id": "c0", "content": "y" * 100_000}
        assert (await b.chat([USER, called("{}"), result])).status_code == 200
        assert [r.ending for r in (await b.record()).requests] == ["truncated"] * 6 + ["stop"] * 2

    sandbox = CONFIG.sandbox.model_copy(update={"output_bytes": 10})
    rollout = CONFIG.rollout.model_copy(update={"context_tokens": 500})
    bench(scenario, CONFIG.model_copy(update={"sandbox": sandbox, "rollout": rollout}))


def test_a_released_attempt_is_refused() -> None:
    """A zombie that calls long after its record was taken generates nothing."""

    async def scenario(b: Bench) -> None:
        await b.chat([USER])
        await b.record()
        b.proxy._calls._recorder._keep_s = -1.0  # all that was taken is released at the next attempt's first call
        await b.chat([USER], attempt="other")
        asked = len(b.engine.asked)
        assert code(await b.fetch()) == (404, "unknown_attempt")
        assert code(await b.chat([USER])) == (409, "attempt_closed")
        await b.proxy.cancel("a0")
        assert len(b.engine.asked) == asked

    bench(scenario)


def test_tools_are_rendered_in_the_order_that_models_were_shown() -> None:
    given = {"type": "function", "function": {"parameters": {"type": "object"}, "description": "d", "name": "f"}}
    (tool,) = parse_tools([given]) or []
    assert list(tool["function"]) == ["name", "description", "parameters"] and tool["function"]["name"] == "f"
