"""The design of the queue in a page: what the state-machine test believes the coordinator must do. No code of hpcrl.

Attempts move LEASED → RUNNING → ARTIFACT_READY → SCORED → ACCEPTED → CONSUMED or end; a rollout has at most one that has not ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BOUND = ("leased", "running")
LIVE = (*BOUND, "artifact_ready", "scored")


@dataclass
class Try:
    name: str
    rollout: str
    worker: str
    step: int
    lease_until: float
    limit: float
    state: str = "leased"
    scorer: str | None = None
    scoring_until: float = 0.0
    scoring_tries: int = 0
    consumed: int | None = None

    @property
    def group(self) -> str:
        return self.rollout.rpartition("-")[0]


@dataclass
class Model:
    group_size: int
    per_step: int
    lag: int
    lease_s: float
    attempt_s: float
    scoring_s: float
    retries: int
    position: int = 0
    lineage: int = -1
    floor: int = 0
    tries: dict[str, Try] = field(default_factory=dict)
    current: dict[str, Try | None] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    last_batch: frozenset[str] | None = None

    # ---- what is asked of it

    def takes(self, name: str, worker: str, states: tuple[str, ...]) -> bool:
        """Whether a report about the attempt by this worker has an effect."""
        known = self.tries.get(name)
        return known is not None and known.worker == worker and known.state in states

    def takes_score(self, name: str, scorer: str) -> bool:
        known = self.tries.get(name)
        return known is not None and known.state == "artifact_ready" and known.scorer == scorer

    def kept(self, state: str) -> set[str]:
        return {name for name, known in self.tries.items() if known.state == state}

    def complete(self) -> list[str]:
        """Unconsumed groups all of whose rollouts have ended, the oldest first."""
        groups: dict[str, list[str]] = {}
        for rollout in self.current:
            groups.setdefault(rollout.rpartition("-")[0], []).append(rollout)
        found = []
        for group, rollouts in groups.items():
            states = [t.state if (t := self.current[r]) is not None else "" for r in rollouts]
            ended = all(
                r in self.dead or state in ("accepted", "consumed") for r, state in zip(rollouts, states, strict=True)
            )
            if group not in self.closed and ended and "consumed" not in states:
                found.append(group)
        return sorted(found)

    # ---- what happens

    def leased(self, name: str, worker: str, step: int, now: float) -> None:
        rollout = name.rpartition("-")[0]
        group = rollout.rpartition("-")[0]
        assert name not in self.tries, "an attempt_id was given twice"
        assert group not in self.closed and rollout not in self.dead
        assert self.current.get(rollout) is None, "a rollout with an attempt under way was leased again"
        assert self.position - step <= self.lag, "an attempt was bound to a version that is out of the bound"
        assert step >= self.floor, "an attempt was bound to a version from which the weights had moved too far"
        for index in range(self.group_size):
            self.current.setdefault(f"{group}-r{index}", None)
        made = Try(name, rollout, worker, step, now + self.lease_s, now + self.attempt_s + self.lease_s)
        self.tries[name] = self.current[rollout] = made

    def end(self, known: Try, state: str) -> None:
        known.state = state
        self.current[known.rollout] = None

    def fail(self, known: Try) -> None:
        self.end(known, "infra_failed")
        self.failures[known.rollout] = self.failures.get(known.rollout, 0) + 1
        if self.failures[known.rollout] > self.retries:
            self.dead.add(known.rollout)
        self.close_failed(known.group)

    def close_failed(self, group: str) -> None:
        """A group of which too little is left is given up."""
        rollouts = [rollout for rollout in self.current if rollout.startswith(f"{group}-")]
        kept = [t for r in rollouts if (t := self.current[r]) is not None and t.state == "accepted"]
        if all(r in self.dead or self.current[r] in kept for r in rollouts) and len(kept) < min(2, self.group_size):
            self.closed.add(group)
            for known in kept:
                self.end(known, "cancelled")

    def accept(self, known: Try) -> None:
        known.state = "accepted"
        self.close_failed(known.group)

    def pass_time(self, now: float) -> None:
        for known in [t for t in self.tries.values() if t.state in LIVE]:
            if known.lease_until <= now or (known.state in BOUND and known.limit <= now):
                self.fail(known)
        for known in [t for t in self.tries.values() if t.state == "artifact_ready" and t.scorer is not None]:
            if known.scoring_until <= now:
                known.scorer = None
                if known.scoring_tries > self.retries:
                    self.fail(known)

    def consume(self, names: set[str]) -> None:
        for name in names:
            known = self.tries[name]
            assert known.state == "accepted", "what is not accepted was put into a batch"
            assert self.position - known.step <= self.lag, "a batch breaks the staleness contract"
            known.state, known.consumed = "consumed", self.position + 1
        self.position += 1
        self.last_batch = frozenset(names)
        self.redraw()

    def give_back(self, spoiled: set[str], end: str) -> None:
        """The batch given out last is not trained; ``spoiled`` of it are drawn again."""
        self.position -= 1
        for name in self.last_batch or ():
            self.tries[name].state, self.tries[name].consumed = "accepted", None
        for name in spoiled:
            self.end(self.tries[name], end)
        self.last_batch = None

    def redraw(self) -> None:
        for known in self.tries.values():
            if known.state in (*LIVE, "accepted") and self.position - known.step > self.lag:
                self.end(known, "cancelled")

    def start(self, step: int) -> None:
        for known in self.tries.values():
            if known.state in BOUND:
                self.end(known, "cancelled")
            elif known.state == "consumed" and (known.consumed or 0) > step:
                known.state, known.consumed = "accepted", None
        self.lineage, self.position, self.last_batch = self.lineage + 1, step, None
        self.floor = min(self.floor, step)
        self.redraw()
