"""What a trainer rank hands to its publisher."""

from __future__ import annotations

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import InferenceSection, ModelSection, TasksSection, WeightsSection
from hpcrl.run.trainer import _patience


def test_a_replica_may_drain_and_start_a_new_engine_before_it_answers() -> None:
    config = RunConfig(
        model=ModelSection(path="m"),
        tasks=TasksSection(train="t"),
        weights=WeightsSection(drain_timeout_s=2000.0),
        inference=InferenceSection(start_timeout_s=3000.0),
    )
    assert _patience(config) > 5000.0
