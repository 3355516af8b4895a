"""YAML file + ``key.path=value`` overrides → RunConfig, with errors that name the key and the nearest valid one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from hpcrl.config.schema import RunConfig
from hpcrl.errors import ConfigError

__all__ = ["dump_config", "load_config", "parse_config"]

_NOT_YAML = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)
"""What yaml raises: its own error, and Python's for dates that do not exist, tags without a value and nesting without an end."""

_LONGEST = 100
"""Characters of a refused value that are shown."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, where PyYAML silently takes the last: a whole section would be lost."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in seen:
                    raise yaml.YAMLError(f"the key {key.value} is given twice, in lines {seen[key.value]} and {line}")
                seen[key.value] = line
        return node


def load_config(path: Path | str, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML run configuration. ``overrides`` are ``section.key=value`` with YAML values. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a YAML text: {error.reason} at byte {error.start}") from error
    try:
        data = yaml.load(text, _Loader)
    except _NOT_YAML as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of sections (model:, tasks:, trainer: …)")
    for override in overrides or []:
        _apply(data, override)
    return parse_config(data, str(path))


def parse_config(data: dict[str, Any], source: str = "configuration") -> RunConfig:
    """Validate a nested mapping. Raises ConfigError: one line, the first problem first."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        problems = [_problem(dict(item)) for item in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(problems)) from error


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r}: expected section.key=value, for example trainer.steps=20")
    *sections, last = key.split(".")
    node = data
    for section in sections:
        child = node.get(section)
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {section} is a value, not a section")
        node = child
    try:
        node[last] = yaml.load(text, _Loader)
    except _NOT_YAML as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML ({_one_line(error)})") from error


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _problem(item: dict[str, Any]) -> str:
    location = [part for part in item["loc"] if isinstance(part, str)]
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        names = _valid_names(location[:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), names, n=1, cutoff=0.4)
        hint = f"did you mean {'.'.join([*location[:-1], near[0]])}?" if near else f"allowed: {', '.join(names)}"
        return f"unknown key {name}; {hint}"
    if item["type"] == "missing":
        return f"missing key {name}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "string_type" and isinstance(item["input"], int | float):
        message += "; put it in quotes"
    given = repr(item["input"])
    if len(given) > _LONGEST:
        given = given[:_LONGEST] + "…"
    return f"{name}: {message} (got {given})" if name else message


def _valid_names(sections: list[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for section in sections:
        annotation = model.model_fields[section].annotation
        kind = next(iter(get_args(annotation)), annotation)  # list[Message] → Message
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        model = kind
    return sorted(model.model_fields)
