"""The trainer's side of a chaos run as a process: the whole protocol and the real shards, no arithmetic.

checkpoint.json or nothing ─► REGISTER, START ─► publish L.S (flip, READY in the background)
BATCH ─► every row read and compared; bad shards quarantined and told ─► "trained" ─► publish L.(S+1)
every second step: checkpoint.json (what was trained so far, in place of weights) ─► CHECKPOINTED

python trainer_step.py RUN_DIR REPLICA_URL STEPS
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.trajectory import ShardCache
from hpcrl.trajectory.names import quarantine

REPLICA = "r0"
EVERY = 2


class TrainerStep:
    def __init__(self, run: RunDir, url: str, steps: int) -> None:
        self.run, self.url, self.steps = run, url, steps
        self.client = c.Client(run, "admin")
        self.cache = ShardCache(run.root, keep=8, patience_s=2.0)
        self.checkpoint = run.root / "checkpoint.json"
        self.background = ThreadPoolExecutor(1)
        self.trained: list[list[str]] = []

    def main(self) -> None:
        step = 0
        if self.checkpoint.exists():
            saved = json.loads(self.checkpoint.read_text())
            step, self.trained = saved["step"], saved["trained"]
        self.client.call(c.REGISTER, m.ReplicaRegister(replica_id=REPLICA, base_url=self.url, node="n"))
        started = self.client.call(c.START, m.TrainerStart(checkpoint_step=step or None))
        sending = self.background.submit(self.publish, f"{started.lineage}.{step}")
        while step < self.steps:
            groups = self.batch(f"{started.lineage}.{step}")
            self.trained += [
                [group.task_id, group.group_id, ref.rollout_id, ref.attempt_id]
                for group in groups
                for ref in group.trajectories
            ]
            step += 1
            sending.result()
            sending = self.background.submit(self.publish, f"{started.lineage}.{step}")
            if step % EVERY == 0 or step == self.steps:
                publish_text(self.checkpoint, json.dumps({"step": step, "trained": self.trained}))
                self.client.call(c.CHECKPOINTED, m.CheckpointDone(version=f"{started.lineage}.{step}"))
        publish_text(self.run.root / "done", "")

    def batch(self, version: str) -> list[m.BatchGroup]:
        while True:
            groups = self.client.call(c.BATCH, m.BatchRequest(version=version, wait_s=2.0)).groups
            if groups is None:
                continue
            refs = [ref for group in groups for ref in group.trajectories]
            bad = self.cache.bad_among(ref.shard for ref in refs)
            for shard, reason in bad.items():
                quarantine(self.run.root / shard)
                self.client.call(c.BAD_SHARD, m.BadShard(version=version, shard=shard, reason=reason))
            if bad:
                continue
            for ref in refs:
                trajectory = self.cache.read(ref.shard, ref.row)
                told = (ref.attempt_id, ref.rollout_id, ref.reward, ref.tokens)
                if (trajectory.attempt_id, trajectory.rollout_id, trajectory.reward, trajectory.tokens) != told:
                    raise SystemExit(f"mixed attempts: {ref} is told of {trajectory.attempt_id}")
            return groups

    def publish(self, version: str) -> None:
        self.client.call(c.PUBLISHED, m.VersionPublished(version=version, digest="d", nbytes=1))
        while not self.client.call(c.FLIP, m.FlipRequest(replica_id=REPLICA, version=version, wait_s=1.0)).granted:
            pass
        ready = m.ReplicaReady(replica_id=REPLICA, version=version, digest="d", transfer_s=0, verify_s=0, pause_s=0)
        self.client.call(c.READY, ready)


if __name__ == "__main__":
    TrainerStep(RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])).main()
