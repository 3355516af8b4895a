"""Configuration: what is refused and how the refusal reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpcrl.config import RunConfig, dump_config, load_config, parse_config
from hpcrl.config.schema import Section
from hpcrl.errors import ConfigError

ROOT = Path(__file__).parents[3]
SMALL = {"model": {"path": "m"}, "tasks": {"train": "t"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


RUNS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("devcluster"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_shipped_run_configurations_are_valid(path: Path) -> None:
    load_config(path)


def test_a_resolved_copy_reads_back_equal() -> None:
    config = parse_config(
        {**SMALL, "trainer": {"optimizer": {"betas": [0.8, 0.9]}}, "slurm": {"env": {"UCX_TLS": "tcp"}}}
    )
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_every_default_is_written_out() -> None:
    written = yaml.safe_load(dump_config(parse_config(SMALL)))
    assert set(written) == set(RunConfig.model_fields)
    assert written["staleness"] == {"max_policy_lag": 0, "max_age_s": None}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.setps=3", "unknown key trainer.setps; did you mean trainer.steps?"),
        ("trainer.optimizer.learning=3", "unknown key trainer.optimizer.learning; "),
        ("trianer.steps=3", "unknown key trianer; did you mean trainer?"),
        ("slurm.qqqqqq=3", "unknown key slurm.qqqqqq; allowed: env, mpi, srun_args"),
        ("trainer.steps=0", "trainer.steps: Input should be greater than 0 (got 0)"),
        ("trainer.steps=many", "trainer.steps: Input should be a valid integer"),
        ("run.name=a/b", "run.name: "),
        ("sandbox.backend=docker", "sandbox.backend: Input should be 'apptainer' or 'process' (got 'docker')"),
        ("model.path=null", "model.path: "),
        ("trainer.optimizer.betas=[2,3]", "trainer.optimizer.betas.0: Input should be less than 1"),
        ("trainer.steps=2020-13-45", "trainer.steps=2020-13-45': the value is not valid YAML (ValueError: month"),
        ("harness.examples=[{role: user, content: a, nmae: x}]", "harness.examples.0.nmae; allowed: content, role"),
    ],
)
def test_a_bad_key_or_value_is_one_line_that_names_it(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_problems_are_told_at_once(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.steps.*; .*eval\.samples"):
        load_config(file, ["trainer.steps=0", "eval.samples=0"])


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: missing key tasks"):
        load_config(path)


def test_overrides_make_sections_and_keep_neighbours(file: Path) -> None:
    config = load_config(file, ["trainer.optimizer.lr=1e-3", "trainer.optimizer.betas=[0.5, 0.6]", "run.seed=7"])
    assert config.trainer.optimizer.lr == 1e-3
    assert config.trainer.optimizer.betas == (0.5, 0.6)
    assert config.run.seed == 7
    assert config.model.path == "m"


def test_a_later_override_wins(file: Path) -> None:
    assert load_config(file, ["run.seed=1", "run.seed=2"]).run.seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("model.path.deeper=3", "path is a value, not a section"),
        ("run.seed=[1", "not valid YAML"),
    ],
)
def test_a_malformed_override_is_quoted(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert repr(override) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not valid YAML"), ("- 1\n- 2\n", "must hold a mapping"), ("", "must hold a mapping")],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*: No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        load_config(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mode=sync", "staleness.max_policy_lag=1"], r"mode: sync means staleness\.max_policy_lag: 0, but it is 1"),
        (["inference.replicas=2", "weights.quorum=3"], r"weights\.quorum is 3 but there are only 2 replicas"),
        (["weights.slots=2", "weights.pin=turn"], r"weights\.slots: 2 is for weights\.pin: trajectory; with pin: turn"),
        (["rollout.max_tokens=64", "rollout.context_tokens=64"], r"rollout\.max_tokens must be smaller"),
        (["harness.examples=[{role: assistant, content: x}]"], r"harness\.examples: .*message 1 is from 'assistant'"),
        (["harness.examples=[{role: user, content: x}]"], r"harness\.examples: .*end with the assistant's answer"),
        (['inference.extra_args=["--logprobs_mode=raw_logprobs"]'], "--logprobs-mode cannot be given"),
        (
            ['inference.extra_args=["--override-generation-config", "{}"]'],
            "--override-generation-config cannot be given",
        ),
        (["harness.kind=command"], "kind: command needs a program"),
        (['harness.command=["agent"]'], "the others take none"),
        (["harness.kind=command", 'harness.command=["agent"]', "harness.system_prompt=x"], "a program has its own"),
    ],
)
def test_keys_that_contradict_each_other(file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file, overrides)
    assert len(str(caught.value)) < 400


def test_sync_is_lag_zero(file: Path) -> None:
    assert load_config(file, ["mode=sync"]).staleness.max_policy_lag == 0


def test_a_configuration_cannot_be_changed_in_place() -> None:
    config = parse_config(SMALL)
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3  # type: ignore[misc]


def test_every_section_refuses_unknown_keys() -> None:
    sections = [field.annotation for field in RunConfig.model_fields.values()]
    models = [
        RunConfig,
        *(section for section in sections if isinstance(section, type) and issubclass(section, Section)),
    ]
    assert len(models) > 10
    assert all(model.model_config.get("extra") == "forbid" for model in models)
