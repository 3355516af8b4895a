from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from toy import END, ToyTokenizer

from hpcrl.config.schema import ModelSection, RolloutSection, RunConfig, TasksSection
from hpcrl.errors import InfraError
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
        self.error: InfraError | None = None
        self.asked: list[tuple[list[int], Sampling, list[int], dict[str, Any]]] = []
        self.hold: asyncio.Event | None = None
        self.cancelled = 0

    async def until_serving(self) -> None:
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
        self, messages: list[dict[str, Any]], attempt: str = "a0", pin: Pin = "trajectory", **more: Any
    ) -> httpx.Response:
        key = sign_attempt_key(SECRET, AttemptKey(attempt, "0.1", "r0", pin))
        return await self.client.post(
            "/v1/chat/completions", json={"messages": messages, **more}, headers={"Authorization": f"Bearer {key}"}
        )

    async def fetch(self, attempt: str = "a0") -> httpx.Response:
        key = records_key(SECRET)
        return await self.client.post(
            "/side/record", json={"attempt_id": attempt}, headers={"Authorization": f"Bearer {key}"}
        )


def bench(scenario: Callable[[Bench], Awaitable[None]], **engine: Any) -> None:
    async def run() -> None:
        fake = FakeEngine(**engine)
        proxy = Proxy(CONFIG, SECRET, "r0", fake, ToyTokenizer())
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
        assert [r.ending for r in record.requests] == ["stop", "error"]
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
        b.engine.error = InfraError("generation_timeout", "slow")
        assert code(await b.chat([USER])) == (503, "generation_timeout")
        b.engine.error = InfraError("engine_unreachable", "dead")
        assert code(await b.chat([USER])) == (503, "engine_unreachable")
        b.engine.error = InfraError("queue_timeout", "flip")
        assert code(await b.chat([USER])) == (503, "queue_timeout")
        record = AttemptRecord.model_validate((await b.fetch()).json())
        assert [r.ending for r in record.requests] == ["abort", "generation_timeout", "error"]

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
