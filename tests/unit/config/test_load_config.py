"""Configuration: what is refused and how the refusal reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpcrl.config import RunConfig, dump_config, load_config, parse_config
from hpcrl.config.sections import Section
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
    assert written["staleness"] == {"max_policy_lag": 0, "max_age_s": None, "max_ratio_dev": None}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.setps=3", "unknown key trainer.setps; did you mean trainer.steps?"),
        ("trainer.optimizer.learning=3", "unknown key trainer.optimizer.learning; "),
        ("trianer.steps=3", "unknown key trianer; did you mean trainer?"),
        ("slurm.qqqqqq=3", "unknown key slurm.qqqqqq; allowed: env, mpi, requeues, srun_args"),
        ("trainer.steps=0", "trainer.steps: Input should be greater than 0 (got 0)"),
        ("trainer.steps=many", "trainer.steps: Input should be a valid integer"),
        ("run.name=a/b", "run.name: "),
        ("sandbox.backend=docker", "sandbox.backend: Input should be 'apptainer' or 'process' (got 'docker')"),
        ("model.path=null", "model.path: "),
        ("trainer.optimizer.betas=[2,3]", "trainer.optimizer.betas.0: Input should be less than 1"),
        ("trainer.steps=2020-13-45", "trainer.steps=2020-13-45': the value is not valid YAML (ValueError: month"),
        ("harness.examples=[{role: user, content: a, nmae: x}]", "harness.examples.0.nmae; allowed: content, role"),
        # Numbers that are none, of the wrong sign or beyond what a clock or the kernel can take.
        ("rollout.attempt_timeout_s=.inf", "rollout.attempt_timeout_s: Input should be a finite number (got inf)"),
        ("trainer.optimizer.lr=.nan", "trainer.optimizer.lr: Input should be a finite number (got nan)"),
        ("weights.chunk_mib=.inf", "weights.chunk_mib: Input should be a finite number"),
        ("staleness.max_age_s=-1", "staleness.max_age_s: Input should be greater than 0 (got -1)"),
        ("rollout.temperature=0", "rollout.temperature: Input should be greater than or equal to 0.01 (got 0)"),
        ("rollout.top_p=0.9", "rollout.top_p: must be 1: the trainer computes the whole distribution"),
        ("trainer.optimizer.lr=0", "trainer.optimizer.lr: Input should be greater than 0 (got 0)"),
        ("coordinator.lease_s=1e400", "coordinator.lease_s: Input should be a finite number"),
        ("scoring.lease_s=1.0e+10", "scoring.lease_s: Input should be less than or equal to 1000000000"),
        ("sandbox.memory_mib=10000000000", "sandbox.memory_mib: Input should be less than or equal to 1000000000"),
        ("weights.chunk_mib=1e-9", "weights.chunk_mib: Input should be greater than or equal to"),
        ("weights.chunk_mib=2048", "weights.chunk_mib: Input should be less than or equal to 1024"),
        ("run.seed=4294967296", "run.seed: Input should be less than 4294967296"),
        ("run.seed=-1", "run.seed: Input should be greater than or equal to 0"),
        ("trainer.steps=yes", "trainer.steps: takes no true or false"),
        ("trainer.optimizer.lr=on", "trainer.optimizer.lr: takes no true or false"),
        ("inference.enforce_eager=2", "inference.enforce_eager: Input should be a valid boolean"),
        # Names and paths.
        ("model.path=''", "model.path: must not be empty"),
        ("tasks.train=' '", "tasks.train: must not be empty"),
        ("tasks.eval=''", "tasks.eval: must not be empty"),
        ("run.dir=''", "run.dir: must not be empty"),
        ("run.name=''", "run.name: must be 1 to 64 letters"),
        ("sandbox.image=''", "sandbox.image: must not be empty"),
        ('model.path="a\\0b"', "model.path: must be one line without control characters"),
        ('run.dir="a\\nb"', "run.dir: must be one line without control characters"),
        ("harness.system_prompt=''", "harness.system_prompt: must not be empty"),
        ("harness.examples=[{role: user, content: ''}]", "harness.examples.0.content: must not be empty"),
        # What goes to other programs.
        ("slurm.mpi=''", "slurm.mpi: must be the name of an MPI plugin of Slurm, such as pmi2 or pmix"),
        ("slurm.mpi='pmi2 --foo'", "slurm.mpi: must be the name of an MPI plugin"),
        ("slurm.srun_args=['']", "slurm.srun_args.0: must not be empty"),
        ("slurm.srun_args=[node1]", "slurm.srun_args: srun would take 'node1' for the command to run"),
        ("slurm.srun_args=['--exclusive', ':']", "slurm.srun_args: ':' would begin another part"),
        ("slurm.srun_args=--exclusive", "slurm.srun_args: Input should be a valid list"),
        ("slurm.env={A-B: x}", "slurm.env: 'A-B' is no name of an environment variable"),
        ("slurm.env={'': x}", "slurm.env: '' is no name of an environment variable"),
        (
            "slurm.env={UCX_RNDV_THRESH: 8192}",
            "slurm.env.UCX_RNDV_THRESH: Input should be a valid string; put it in quotes",
        ),
        ('slurm.env={A: "x\\0"}', "slurm.env: the value of A holds a NUL character"),
        ("inference.extra_args=['']", "inference.extra_args.0: must not be empty"),
        ("inference.extra_args=[--port, '8000']", "inference.extra_args: --port is hpcrl's own and cannot be changed"),
        (
            "inference.extra_args=[--max_model_len=9]",
            "--max_model_len=9 is set by rollout.context_tokens; set that key",
        ),
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


def test_a_refused_value_is_shown_in_part_when_it_is_long(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [f"run.name={'x' * 5000}"])
    assert len(str(caught.value)) < 400


def test_values_at_the_edge_are_accepted(file: Path) -> None:
    edge = [
        "coordinator.lease_s=10",
        "coordinator.heartbeat_s=5",
        "run.seed=4294967295",
        "slurm.env={UCX_TLS: 'tcp,self', _x1: ''}",
        "slurm.srun_args=[-w, node1]",
        "slurm.mpi=pmix_v4",
        "inference.extra_args=[--swap-space, '0', --no-enable-prefix-caching]",
        "harness.show_exit_code=yes",
        "run.name='on'",
    ]
    config = load_config(file, edge)
    assert config.run.name == "on"
    assert config.harness.show_exit_code is True


@pytest.mark.parametrize(
    ("text", "twice"),
    [
        ("trainer: {steps: 1}\nmodel: {path: m}\ntrainer: {ranks: 2}\n", "trainer is given twice, in lines 1 and 3"),
        ("trainer:\n  steps: 1\n  steps: 2\n", "steps is given twice, in lines 2 and 3"),
    ],
)
def test_a_key_that_is_given_twice(tmp_path: Path, text: str, twice: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=twice):
        load_config(path)


def test_a_key_that_is_given_twice_in_an_override(file: Path) -> None:
    with pytest.raises(ConfigError, match="a is given twice"):
        load_config(file, ["slurm.env={a: x, a: y}"])


def test_anchors_and_merges_are_no_repetition(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: &m {path: m}\ntasks: {train: t}\nslurm: {env: {<<: *m, path: n}}\n")
    assert load_config(path).slurm.env == {"path": "n"}


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
        (
            ["coordinator.lease_s=9", "coordinator.heartbeat_s=5"],
            r"coordinator\.lease_s \(9\) must be at least twice coordinator\.heartbeat_s \(5\)",
        ),
        (["rollout.max_tokens=64", "rollout.context_tokens=64"], r"rollout\.max_tokens \(64\) must be smaller"),
        (["weights.slots=3"], r"weights\.slots: 3 is for lora; without it a replica has 1 engine or 2"),
        (["lora.rank=8", "weights.pin=token"], r"weights\.pin: token is not for lora"),
        (["lora.rank=8", "weights.slots=1"], r"weights\.slots: 1 is not for lora"),
        (["lora.dropout=0.1"], r"lora\.dropout: .*less than or equal to 0 \(got 0\.1\)"),
        (["lora.target_modules=[]"], r"lora\.target_modules: "),
        (["lora.target_modules=[self_attn.q_proj]"], r"lora\.target_modules\.0: .*pattern"),
        (["lora.ranks=8"], r"unknown key lora\.ranks; did you mean lora\.rank\?"),
        (["harness.examples=[{role: assistant, content: x}]"], r"harness\.examples: .*message 1 is from 'assistant'"),
        (["harness.examples=[{role: user, content: x}]"], r"harness\.examples: .*end with the assistant's answer"),
        (['inference.extra_args=["--logprobs_mode=raw_logprobs"]'], "--logprobs-mode is hpcrl's own"),
        (
            ['inference.extra_args=["--override-generation-config", "{}"]'],
            "--override-generation-config is hpcrl's own",
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


def test_how_many_versions_a_replica_serves(file: Path) -> None:
    def slots(*overrides: str) -> tuple[int, int]:
        config = load_config(file, list(overrides))
        return config.slots, config.engines

    assert slots() == (1, 1)
    assert slots("weights.slots=2") == (2, 2)
    assert slots("lora.rank=8", "staleness.max_policy_lag=3") == (5, 1)
    assert slots("lora.rank=8", "staleness.max_policy_lag=100") == (8, 1)
    assert slots("lora.rank=8", "weights.slots=2", "weights.pin=turn") == (2, 1)


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
