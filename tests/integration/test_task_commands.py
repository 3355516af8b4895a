"""`hpcrl tasks`, `images` and `score` with real containers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.coordinator.database import open_database
from hpcrl.errors import EnvironmentFault
from hpcrl.protocol.rundir import RunDir
from hpcrl.sandbox.image_cache import cached_images
from hpcrl.sandbox.images import resolve
from hpcrl.sandbox.tasks import load_task
from hpcrl.scoring.artifacts import store_artifact

pytestmark = pytest.mark.apptainer

ROOT = Path(__file__).parents[2]
REWARD = "/logs/verifier/reward.txt"
CHECK = f"if grep -q right out.txt; then echo 1; else echo 0; fi > {REWARD}"


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Not below pytest's own directories: run by root, sandboxes are user nobody, who cannot pass through those.
    folder = Path(tempfile.mkdtemp(prefix="hpcrl-test-", dir="/var/tmp"))
    os.chmod(folder, 0o755)
    monkeypatch.chdir(ROOT)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def own_cache(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty image cache, in which the site has named one image ``small:1``."""
    image = resolve(str(ROOT / "containers/sandbox.def")).path
    cache = base / "cache"
    (cache / "images").mkdir(parents=True)
    (cache / "images" / "small_1").symlink_to(image)
    monkeypatch.setenv("HPCRL_CACHE", str(cache))
    return cache


def add(
    folder: Path, name: str, test: str = CHECK, solution: str | None = "echo right > out.txt", toml: str = ""
) -> Path:
    task = folder / name
    (task / "tests").mkdir(parents=True)
    (task / "environment" / "files").mkdir(parents=True)
    (task / "environment" / "files" / "out.txt").write_text("wrong\n")
    (task / "tests" / "test.sh").write_text(test)
    (task / "instruction.md").write_text("Make out.txt right.")
    (task / "task.toml").write_text(toml)
    if solution is not None:
        (task / "solution").mkdir()
        (task / "solution" / "solve.sh").write_text(solution)
        (task / "solution" / "answer").write_text("right\n")
    return task


def invoke(*argv: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in argv])
    return result.exit_code, result.stdout, result.stderr


def test_check_says_of_each_task_whether_it_is_fit(base: Path) -> None:
    tasks = base / "tasks"
    add(tasks, "good")
    add(
        tasks,
        "solved-from-its-files",
        solution='cp /solution/answer out.txt; test "$K" = v',
        toml='[solution]\nenv = {K = "v"}\n',
    )
    add(tasks, "wrong-solution", solution="echo no > out.txt; echo oops; exit 3")
    add(tasks, "free", f"echo 1 > {REWARD}")
    add(tasks, "background", f"(sleep 60 &) ; {CHECK}")
    add(tasks, "silent", f"grep -q right out.txt && echo 1 > {REWARD}")
    add(tasks, "slow", "sleep 60", toml="[verifier]\ntimeout_sec = 0.5\n")
    add(tasks, "flaky", f"head -c 8 /dev/urandom | cksum | cut -d ' ' -f 1 | sed 's/^/0./' > {REWARD}")
    add(tasks, "unsolved", solution=None)
    code, text, error = invoke("tasks", "check", tasks, "--json")
    assert (code, error.splitlines()[-1]) == (2, "hpcrl: 6 of 9 tasks have problems")
    found = {row["task"]: row for row in json.loads(text)}
    for name in ("good", "solved-from-its-files"):
        assert found[name]["ok"] and found[name]["oracle"] == [1, 1] and found[name]["nothing"] == [0, 0]
    assert found["unsolved"]["ok"] and "no solution" in found["unsolved"]["notes"][0]

    def problem(name: str) -> str:
        return "\n".join(found[name]["problems"])

    assert "the solution scores 0, not 1" in problem("wrong-solution")
    assert "solve.sh ended with status 3: oops" in problem("wrong-solution")
    assert problem("free") == "doing nothing scores 1: the tests pass without the task being done"
    assert "the solution scores 0: verifier_background; the tests leave a process" in problem("background")
    assert "doing nothing gets no score: no_reward" in problem("silent") and "in every case" in problem("silent")
    assert "verifier_timeout; the tests do not end in time" in problem("slow")
    assert "does not score the same each time" in problem("flaky")


def test_check_of_one_task_prints_a_table(base: Path) -> None:
    code, text, error = invoke("tasks", "check", add(base, "one"), add(base, "two", f"echo 1 > {REWARD}"))
    assert code == 2 and "hpcrl: 1 of 2 tasks have problems" in error
    assert "1 1" in text and "BAD" in text and "1 of 2 tasks are fit" in text
    assert f"{base / 'two'}: doing nothing scores 1" in text


def test_run_one_attempt_with_each_agent(base: Path) -> None:
    tasks = base / "tasks"
    add(tasks, "a")
    add(tasks, "b", "exit 0")
    code, text, error = invoke("tasks", "run", tasks, "--agent", "oracle", "--json")
    assert code == 1 and "1 of 2 attempts got no score" in error
    solved, broken = json.loads(text)
    assert solved["reward"] == 1 and broken["reward"] is None and broken["failure"].startswith("no_reward")
    code, text, _ = invoke("tasks", "run", tasks / "a", "--agent", "nothing")
    assert code == 0 and "mean reward 0.000 over 1 of 1 tasks" in text
    program = base / "agent.sh"
    program.write_text('#!/bin/sh\ntest "$OPENAI_BASE_URL" = http://model/v1 && $HPCRL_EXEC "echo right > out.txt"\n')
    program.chmod(0o755)
    code, text, _ = invoke(
        "tasks", "run", tasks / "a", "--agent", f"command:{program}", "--endpoint", "http://model/v1", "--json"
    )
    assert code == 0 and json.loads(text)[0]["reward"] == 1
    code, text, _ = invoke("tasks", "run", tasks / "a", "--agent", "command:false", "--json")
    assert code == 0 and json.loads(text)[0]["reward"] == 0 and "ended with 1" in json.loads(text)[0]["detail"]


def test_only_declared_artifacts_reach_a_separate_verifier(base: Path) -> None:
    toml = 'artifacts = ["out.txt"]\n[verifier]\nenvironment_mode = "separate"\n'
    test = f"if [ -e other ]; then echo 0; else cat out.txt | grep -c right; fi > {REWARD}"
    task = add(base, "one", test, "echo right > out.txt; touch other", toml)
    assert json.loads(invoke("tasks", "run", task, "--agent", "oracle", "--json")[1])[0]["reward"] == 1
    (task / "task.toml").write_text(toml.replace("separate", "shared"))
    assert json.loads(invoke("tasks", "run", task, "--agent", "oracle", "--json")[1])[0]["reward"] == 0


def test_score_again_from_the_command_line(base: Path) -> None:
    tasks = base / "tasks"
    task = add(tasks, "one")
    run = RunDir(base / "run")
    run.create()
    run.config.write_text(yaml.safe_dump({"model": {"path": "m"}, "tasks": {"train": str(tasks)}}))
    image = resolve(str(ROOT / "containers/sandbox.def"))
    version = load_task(task).environment_version(image)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        first = tarfile.TarInfo(".")
        first.type, first.pax_headers = tarfile.DIRTYPE, {"HPCRL.artifact": "1", "HPCRL.deleted": "[]"}
        archive.addfile(first)
        member = tarfile.TarInfo("out.txt")
        member.size, member.mode = 6, 0o644
        archive.addfile(member, io.BytesIO(b"right\n"))
    path, digest = store_artifact(run, buffer.getvalue())
    connection = open_database(run.database)
    with connection:
        connection.execute("INSERT INTO groups (group_id, task_id, split) VALUES ('g', 'one', 'train')")
        connection.executemany(
            "INSERT INTO attempts (attempt_id, group_id, artifact, digest, environment_version, reward) VALUES (?, 'g', ?, ?, ?, 0)",
            [("a0", path, digest, version), ("a1", path, digest, "sha256-other")],
        )
    connection.close()
    code, text, error = invoke("score", run.root, "--verifier", tasks)
    assert code == 1 and "1 environment_changed" in error
    assert "2 attempts: 0 as before, 1 higher, 0 lower, 0 that had no score, 1 failed" in text
    assert "mean reward 0.0000 before, 1.0000 now" in text and "a1: environment_changed" in text
    code, text, _ = invoke("score", run.root, "--verifier", task, "--json")
    counts = json.loads(text)
    assert code == 1 and counts["raised"] == 1 and len(Path(counts["file"]).read_text().splitlines()) == 3


def _archive(path: Path) -> None:
    """A `docker save` of one layer: a shell with its libraries."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        linked = subprocess.run(["ldd", "/bin/dash"], capture_output=True, text=True, check=True).stdout.split()
        for name in [word for word in linked if word.startswith("/")]:
            archive.add(os.path.realpath(name), name.lstrip("/"))
        archive.add(os.path.realpath("/bin/dash"), "bin/sh")
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["A=b"]},
            "rootfs": {"type": "layers", "diff_ids": []},
        }
    )
    manifest = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": ["layer.tar"]}]
    digest = "sha256:" + hashlib.sha256(layer.getvalue()).hexdigest()
    config = config.replace('"diff_ids": []', f'"diff_ids": ["{digest}"]')
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("config.json", config.encode()),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_a_docker_archive_is_unpacked_once_listed_and_pruned(base: Path, own_cache: Path) -> None:
    _archive(base / "image.tar")
    name = f"docker-archive:{base / 'image.tar'}"
    hpcrl = str(ROOT / ".venv/bin/hpcrl")
    done = subprocess.run([hpcrl, "images", "build", name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert (path / "bin" / "sh").exists() and path.parent == own_cache / "images"
    code, text, _ = invoke("images", "ls", "--json")
    [row] = json.loads(text)
    assert code == 0 and row["key"] == path.name and row["source"].endswith("image.tar") and not row["in_use"]
    assert path.name[:19] in invoke("images", "ls")[1]
    assert "0 images" in invoke("images", "prune")[1]  # used today
    assert "would remove" in invoke("images", "prune", "--older-than", "0", "--dry-run")[1]
    resolve(name)
    assert "0 images" in invoke("images", "prune", "--older-than", "0")[1] and path.is_dir()  # in use by this process
    code, _, error = invoke("images", "prune", "nothing-of-that-name")
    assert code == 2 and "no image nothing-of-that-name" in error


def test_a_sif_is_unpacked(base: Path, own_cache: Path) -> None:
    _archive(base / "image.tar")
    built = subprocess.run(
        ["apptainer", "--silent", "build", str(base / "image.sif"), f"docker-archive:{base / 'image.tar'}"],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    code, text, error = invoke("images", "build", base / "image.sif")
    assert code == 0, error
    assert (Path(text.strip()) / "bin" / "sh").exists()


DOCKERFILE = """\
FROM small:1
WORKDIR /app
COPY files/ /app/
COPY one.txt two/three.txt
ENV GREETING="hello there" PATH="/opt/bin:$PATH"
RUN echo "$GREETING" > made.txt && \\
    mkdir -p /opt/bin
RUN ["sh", "-c", "printf '#!/bin/sh\\\\necho tool' > /opt/bin/tool; chmod 755 /opt/bin/tool"]
"""


def test_a_task_runs_in_the_image_of_its_dockerfile(base: Path, own_cache: Path) -> None:
    resolve("small:1")
    seen = '"$GREETING $(cat made.txt) $(tool) $(cat two/three.txt)"'
    test = f'if [ {seen} = "hello there hello there tool 1" ]; then cat out.txt; fi > {REWARD}'
    task = add(base, "one", test, "echo 1 > out.txt", '[environment]\nimage = "environment/Dockerfile"\n')
    (task / "environment" / "one.txt").write_text("1")
    (task / "environment" / "Dockerfile").write_text(DOCKERFILE)
    before = sorted(os.listdir(own_cache / "images" / "small_1"))
    config = base / "run.yaml"
    config.write_text(
        yaml.safe_dump({"model": {"path": "m"}, "tasks": {"train": "t"}, "sandbox": {"image": "small:1"}})
    )
    code, text, error = invoke("tasks", "run", task, "--agent", "oracle", "--json", "--config", config)
    assert code == 0, text + error
    assert json.loads(text)[0]["reward"] == 1
    assert sorted(os.listdir(own_cache / "images" / "small_1")) == before  # the base stays as it was
    [image] = cached_images(own_cache)
    assert image.source.endswith("Dockerfile") and not (image.path / ".hpcrl-build").exists()
    (task / "environment" / "Dockerfile").write_text("FROM small:1\nRUN exit 3\n")
    with pytest.raises(EnvironmentFault, match="status 3"):
        resolve("environment/Dockerfile", task)
    code, text, error = invoke("tasks", "check", task, "--config", config)
    assert code == 2 and "failed (status 3)" in text and "1 of 1 tasks have problems" in error
    (task / "environment" / "Dockerfile").write_text("FROM small:1\nCOPY --from=x a b\n")
    code, text, _ = invoke("tasks", "check", "--quick", task)
    assert code == 2 and "line 2: COPY --from=x is not supported" in text


ROW: dict[str, Any] = {
    "instance_id": "own__calc-1",
    "repo": "own/calc",
    "base_commit": "0",
    "problem_statement": "add(1, 2) is -1.",
    "patch": "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n",
    "test_patch": "--- a/test_calc.py\n+++ b/test_calc.py\n@@ -1,3 +1,4 @@\n import calc\n \n CASES = {'zero': calc.add(0, 0) == 0}\n"
    "+CASES['add'] = calc.add(1, 2) == 3\n",
    "FAIL_TO_PASS": ["test_calc.py::add"],
    "PASS_TO_PASS": ["test_calc.py::zero"],
    "test_cmd": "python3 runner.py",
}
RUNNER = """\
import test_calc
for name, good in test_calc.CASES.items():
    print('PASSED' if good else 'FAILED', f'test_calc.py::{name}')
"""


def test_a_swebench_instance_becomes_a_fit_task(base: Path, own_cache: Path) -> None:
    context = base / "context"
    (context / "repo").mkdir(parents=True)
    for name, content in (
        ("calc.py", "def add(a, b):\n    return a - b\n"),
        ("test_calc.py", "import calc\n\nCASES = {'zero': calc.add(0, 0) == 0}\n"),
        ("runner.py", RUNNER),
    ):
        (context / "repo" / name).write_text(content)
    lines = ["FROM small:1", "COPY repo/ /testbed/"]
    git = shutil.which("git") or pytest.skip("needs git")
    linked = subprocess.run(["ldd", git], capture_output=True, text=True, check=True).stdout.split()
    libraries = [word for word in linked if re.match(r"/.*/lib(pcre2|z)", word)]  # the image has the others
    for number, name in enumerate([git, *libraries]):
        shutil.copy(os.path.realpath(name), context / f"file{number}")
        place = name if name == git else f"/usr/lib/x86_64-linux-gnu/{os.path.basename(name)}"
        lines.append(f"COPY file{number} {place}")
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    (base / "row.json").write_text(json.dumps(ROW))
    code, text, error = invoke(
        "tasks", "convert", "swebench", base / "row.json", "--out", base / "out", "--image", context / "Dockerfile"
    )
    assert code == 0, error
    assert "1 tasks in" in text
    config = base / "run.yaml"
    config.write_text(
        yaml.safe_dump({"model": {"path": "m"}, "tasks": {"train": "t"}, "sandbox": {"image": "small:1"}})
    )
    code, text, error = invoke("tasks", "check", base / "out", "--json", "--config", config)
    assert code == 0, text + error
    [row] = json.loads(text)
    assert row["oracle"] == [1, 1] and row["nothing"] == [0, 0]
    # Changed tests and git settings of the agent do not count.
    program = base / "agent.sh"
    program.write_text(
        "#!/bin/sh\n$HPCRL_EXEC \"echo 'CASES = dict(add=True, zero=True)' > test_calc.py; mkdir .git; echo x > .git/config\"\n"
    )
    program.chmod(0o755)
    code, text, _ = invoke("tasks", "run", base / "out", "--agent", f"command:{program}", "--json", "--config", config)
    assert code == 0 and json.loads(text)[0]["reward"] == 0
