"""Names that clients may send for the served model: `--served-model-name a,b,claude-*`."""

from __future__ import annotations


def served_names(setting: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The plain names of a setting, and its patterns: those with `*` or `?`, which stand for any characters or for one."""
    given = dict.fromkeys(name.strip() for name in setting.split(","))
    given.pop("", None)
    patterns = tuple(name for name in given if "*" in name or "?" in name)
    return tuple(name for name in given if name not in patterns), patterns


def with_own_name(setting: str, own: str) -> str:
    """The setting, with the model's own name first if it has only patterns, which can't be used as a name in
    answers."""
    names, patterns = served_names(setting)
    return ",".join((*(names or (own,)), *patterns))
