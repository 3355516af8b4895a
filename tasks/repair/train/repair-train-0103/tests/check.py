"""Private check of a repair task: calls the function in ``sol.py`` on hidden cases and writes the reward.

    python3 -I -S check.py CASES SOL REWARD

The generator copies this file into each task's ``tests/``. It runs once per episode, in a sandbox image whose Python is
minimal, so it imports built-in modules only. ``CASES`` holds one literal ``(name, [(arguments, expected), ...])``;
``REWARD`` gets 1 or 0. Without readable cases no reward is written: that is a broken task, not a failed repair.

The tested source cannot forge the result: it may use neither attributes, strings nor dunder names (checked on its
text), gets six harmless builtins, and is killed by the default action of SIGPROF after 1 s of processor time. That counts
no waiting, so a busy node fails no right repair; none of the builtins waits, and the verifier's wall-clock limit holds
anyway. The reward is 0 until all cases have passed.
"""

import _signal  # type: ignore[import-not-found]
import sys

ALLOWED_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ \n()[],:+-*/%<>=!")
MAX_SOURCE_CHARACTERS = 400
BUILTINS = {"sum": sum, "max": max, "min": min, "len": len, "sorted": sorted, "range": range}


def is_plain(source: str) -> bool:
    """True if ``source`` cannot reach outside its own namespace nor grow numbers without bound."""
    return (
        len(source) <= MAX_SOURCE_CHARACTERS
        and ALLOWED_CHARACTERS.issuperset(source)
        and "__" not in source
        and "**" not in source
    )


def passes(source: str, name: str, cases: list) -> bool:
    """Whether function ``name`` of ``source`` gives value and type expected by every ``(arguments, expected)``."""
    if not is_plain(source):
        return False
    namespace: dict = {"__builtins__": dict(BUILTINS)}
    try:
        exec(source, namespace)  # that is the point; is_plain() has bounded what it can do
        function = namespace[name]
        for arguments, expected in cases:
            got = function(*arguments)
            if type(got) is not type(expected) or got != expected:
                return False
    except BaseException:  # noqa: BLE001  whatever the tested code raises, it did not pass
        return False
    return True


def main(cases_path: str, source_path: str, reward_path: str) -> None:
    """Write the reward of the file at ``source_path``."""
    with open(cases_path, encoding="utf-8") as file:
        name, cases = eval(file.read(), {"__builtins__": {}})
    _write(reward_path, "0\n")
    try:
        with open(source_path, encoding="utf-8") as file:
            source = file.read(MAX_SOURCE_CHARACTERS + 1)
    except (OSError, ValueError):
        return
    _signal.setitimer(_signal.ITIMER_PROF, 1.0)
    passed = passes(source, name, cases)
    _signal.setitimer(_signal.ITIMER_PROF, 0.0)
    if passed:
        _write(reward_path, "1\n")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
