from __future__ import annotations

import pytest

from hpcrl.errors import UserError
from hpcrl.sandbox.dockerfile import last_workdir, parse_dockerfile


def test_steps_keep_their_order() -> None:
    recipe = parse_dockerfile(
        """# a comment
FROM python:3.12 AS base
LABEL a=b
WORKDIR /app
COPY files/ ./src/
RUN one && \\
    # in between
    two
ENV A=1 B="x $A" C='$'
RUN ["three", "a b"]
CMD ["python"]
""",
        "Dockerfile",
    )
    assert recipe.base == "python:3.12" and recipe.copies == [("files/", "0")]
    assert recipe.environment == ['export A="1"', 'export B="x $A"', "export C='$'"]
    order = ["mkdir -p /app", "/.hpcrl-build/0/tree", "one &&", 'export A="1"', "exec three 'a b'"]
    places = [recipe.script.index(part) for part in order]
    assert places == sorted(places)
    assert "two" in recipe.script and "in between" not in recipe.script and "cd /app" in recipe.script


def test_the_old_form_of_env_args_and_a_shell() -> None:
    recipe = parse_dockerfile(
        'ARG V=1\nFROM x\nENV NAME a b\nARG W="2"\nSHELL ["/bin/bash", "-c"]\nUSER root\nRUN echo $W\n', "D"
    )
    assert recipe.environment == ['export NAME="a b"']
    assert 'export W="2"' in recipe.script and "exec /bin/bash -c 'echo $W'" in recipe.script


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RUN true\n", "line 1: RUN stands before FROM"),
        ("# nothing\n", "has no FROM"),
        ("# escape=`\nFROM x\n", "escape character"),
        ("FROM scratch\n", "FROM scratch"),
        ("FROM $BASE\n", "FROM $BASE"),
        ("FROM x AS a\nFROM y\n", "line 2: a second FROM (multi-stage build)"),
        ("FROM x\nRUN --mount=type=cache,target=/c pip install y\n", "RUN --mount=type=cache,target=/c"),
        ("FROM x\nRUN <<EOF\necho\nEOF\n", "RUN with a here-document"),
        ("FROM x\nCOPY --from=a /b /c\n", "COPY --from=a"),
        ("FROM x\nCOPY --chown=1:1 b c\n", "COPY --chown=1:1"),
        ("FROM x\nCOPY *.py /a/\n", "COPY *.py"),
        ("FROM x\nCOPY ../x /a\n", "COPY ../x"),
        ("FROM x\nCOPY a\n", "a source and a destination"),
        ("FROM x\nADD https://a.example/b /c\n", "ADD https://a.example/b"),
        ("FROM x\nADD a.tar.gz /c\n", "ADD a.tar.gz"),
        ("FROM x\nUSER alice\n", "USER alice"),
        ("FROM x\nARG VERSION\n", "ARG VERSION has no default"),
        ("FROM x\nENV A=`id`\n", "ENV A"),
        ("FROM x\nENV A=$(id)\n", "ENV A"),
        ('FROM x\nENV A=b="c\n', "cannot be read"),
        ("FROM x\nWORKDIR $HOME\n", "WORKDIR $HOME"),
        ("FROM x\nSHELL bash\n", "SHELL bash"),
        ("FROM x\nONBUILD RUN true\n", "line 2: ONBUILD is not supported"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_dockerfile(text, "D")
    assert words in str(caught.value) and str(caught.value).startswith("D")


def test_the_last_work_directory() -> None:
    assert last_workdir("FROM x\nWORKDIR /a\nworkdir /b\n") == "/b"
    assert last_workdir("FROM x\n") is None
    assert last_workdir("FROM x\nWORKDIR $A\n") is None
