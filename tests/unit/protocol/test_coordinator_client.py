"""Both clients against a real HTTP server: retries under one key, a coordinator that moves, the end of patience."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hpcrl.errors import InfraError
from hpcrl.protocol import client as api
from hpcrl.protocol import messages as m
from hpcrl.protocol.client import ENDPOINTS, AsyncClient, Client, CoordinatorGone, Endpoint, wait_for_endpoint
from hpcrl.protocol.keyfiles import issue_keys
from hpcrl.protocol.keys import role_key
from hpcrl.protocol.rundir import RunDir, publish_text

Call = Callable[[RunDir, float, Endpoint, m.Message], m.Message]


def call_blocking(run: RunDir, patience_s: float, endpoint: Endpoint, request: m.Message) -> m.Message:
    client = Client(run, "admin", patience_s)
    try:
        return client.call(endpoint, request)
    finally:
        client.close()


def call_async(run: RunDir, patience_s: float, endpoint: Endpoint, request: m.Message) -> m.Message:
    async def once() -> m.Message:
        client = AsyncClient(run, "admin", patience_s)
        try:
            return await client.call(endpoint, request)
        finally:
            await client.close()

    return asyncio.run(once())


@pytest.fixture(params=[call_blocking, call_async], ids=["blocking", "async"])
def call(request: pytest.FixtureRequest) -> Call:
    return request.param


@dataclass
class Coordinator:
    """Answers each POST with the next of ``answers`` (status, body; the last for ever); None hangs up without an answer."""

    answers: list[tuple[int, bytes] | None]
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(*answers: tuple[int, bytes] | None) -> Iterator[Coordinator]:
    state = Coordinator(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.requests.append((self.path, dict(self.headers), body))
            answer = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
            if answer is None:
                self.close_connection = True
                return
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.create()
    publish_text(found.token, "the secret\n", 0o600)
    issue_keys(found)
    return found


OK = (200, b"{}")
FINISH = m.Finish(reason="over")


def test_a_call_carries_the_roles_key_and_the_body(run: RunDir, call: Call) -> None:
    with serving(OK) as coordinator:
        run.announce("coordinator", coordinator.url)
        assert call(run, 5.0, api.FINISH, FINISH) == m.Empty()
    [(path, headers, body)] = coordinator.requests
    assert path == "/v1/admin/finish"
    assert headers["Authorization"] == f"Bearer {role_key('the secret', 'admin')}"
    assert m.Finish.model_validate_json(body) == FINISH


def test_retries_keep_one_idempotency_key_and_new_calls_get_new_ones(run: RunDir, call: Call) -> None:
    with serving((503, b""), None, (502, b""), OK) as coordinator:
        run.announce("coordinator", coordinator.url)
        call(run, 10.0, api.FINISH, FINISH)
        call(run, 10.0, api.FINISH, FINISH)
    keys = [headers["Idempotency-Key"] for _, headers, _ in coordinator.requests]
    assert len(keys) == 5
    assert len(set(keys[:4])) == 1
    assert keys[4] != keys[0]
    assert len({body for _, _, body in coordinator.requests}) == 1


def test_a_restarted_coordinator_is_found_at_its_new_address(run: RunDir, call: Call) -> None:
    with serving(OK) as first:
        pass  # its port is closed now: connections are refused
    with serving((503, b"")) as second, serving(OK) as third:
        run.announce("coordinator", first.url)
        moves = [threading.Timer(0.05, run.announce, ("coordinator", second.url))]
        moves.append(threading.Timer(0.15, run.announce, ("coordinator", third.url)))
        for move in moves:
            move.start()
        assert call(run, 10.0, api.FINISH, FINISH) == m.Empty()
        for move in moves:
            move.join()
    keys = {headers["Idempotency-Key"] for _, headers, _ in (*second.requests, *third.requests)}
    assert len(keys) == 1
    assert third.requests


def test_a_coordinator_that_has_not_announced_itself_is_waited_for(run: RunDir, call: Call) -> None:
    with serving(OK) as coordinator:
        timer = threading.Timer(0.05, run.announce, ("coordinator", coordinator.url))
        timer.start()
        assert call(run, 10.0, api.FINISH, FINISH) == m.Empty()
        timer.join()


@pytest.mark.parametrize("announced", [False, True])
def test_patience_ends_with_what_was_seen_last(run: RunDir, call: Call, announced: bool) -> None:
    if announced:
        with serving(OK) as gone:
            run.announce("coordinator", gone.url)
    start = time.monotonic()
    with pytest.raises(CoordinatorGone, match="coordinator_gone: no answer to /v1/admin/finish for") as caught:
        call(run, 0.1, api.FINISH, FINISH)
    assert time.monotonic() - start < 3.0
    assert ("not announced" in str(caught.value)) is not announced


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 500])
def test_a_refusal_is_told_at_once_and_not_repeated(run: RunDir, call: Call, status: int) -> None:
    with serving((status, b"because")) as coordinator:
        run.announce("coordinator", coordinator.url)
        with pytest.raises(InfraError, match=f"coordinator_refused: /v1/admin/finish: {status} because") as caught:
            call(run, 5.0, api.FINISH, FINISH)
    assert not isinstance(caught.value, CoordinatorGone)
    assert len(coordinator.requests) == 1


def test_a_proxy_of_the_site_is_not_asked(run: RunDir, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(OK) as coordinator:
        run.announce("coordinator", coordinator.url)
        assert call(run, 1.0, api.FINISH, FINISH) == m.Empty()


def test_without_keys_a_client_says_what_may_be_wrong(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cannot read the worker's keys"):
        Client(RunDir(tmp_path), "worker")


def test_the_table_has_each_path_once_under_its_role() -> None:
    paths = [endpoint.path for endpoint in ENDPOINTS]
    assert len(set(paths)) == len(paths)
    assert all(endpoint.path.startswith(f"/v1/{endpoint.role}/") for endpoint in ENDPOINTS)
    table = {value for value in vars(api).values() if isinstance(value, Endpoint)}
    assert table == set(ENDPOINTS)


def test_waiting_for_an_endpoint(run: RunDir) -> None:
    with pytest.raises(InfraError, match=r"no_endpoint: coordinator did not announce itself in .* within 0 s"):
        wait_for_endpoint(run, "coordinator", 0.0)
    with pytest.raises(InfraError, match="no_endpoint: coordinator ended before it announced itself"):
        wait_for_endpoint(run, "coordinator", 5.0, alive=lambda: False)
    run.announce("coordinator", "http://10.0.0.1:1")
    assert wait_for_endpoint(run, "coordinator", 0.0) == "http://10.0.0.1:1"
