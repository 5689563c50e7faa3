"""From names and values to a `Config`: keyword arguments, parsed flags, variables, a YAML file, a profile.

Precedence, highest first: flags (or keyword arguments), `BOUGH_*` variables, the file, the profile, the defaults. If none of
the first three says which machine this is, the variables of LeaderWorkerSet and torchrun do.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.config.check import check
from bough.config.concerns import Config
from bough.config.flags import (
    ALIASES,
    ENV_PREFIX,
    Alias,
    Setting,
    Value,
    is_setting,
    lookup,
    nearest,
    parse_value,
    settings,
    show_value,
    value_word,
)
from bough.config.hosts import MACHINE_SETTINGS, machine_variables
from bough.config.presets import preset
from bough.config.sglang import take
from bough.config.speculation import read_speculative_config
from bough.core.errors import ConfigError

OTHER_VARIABLES = {"SGLANG_LOG_LEVEL": "log_level"}
"""Variables of SGLang's that are settings here; `BOUGH_*` variables win over them."""

SECRETS = frozenset(
    {"api_key", "api_keys_file", "admin_api_key", "metrics_api_key", "dist_secret", "ssl_keyfile_password"}
)
"""Settings that are never shown (secrets)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checked configuration, and where each of its values came from."""

    config: Config
    origins: Mapping[str, str]
    """Setting -> "--flag", "BOUGH_X", the file's name or the profile; unset ones are absent."""
    notes: tuple[str, ...]
    """Messages for the user, for example about aliases."""


def _spread_speculative_config(values: dict[str, Value], origins: dict[str, str]) -> None:
    """Settings from vLLM's --speculative-config that are not given explicitly."""
    text = values.get("speculative_config")
    if isinstance(text, str) and text:
        origin = origins["speculative_config"]
        for name, value in read_speculative_config(text, origin).items():
            if name not in values:
                values[name], origins[name] = value, origin


def _attention_replicas(values: dict[str, Value], origins: dict[str, str]) -> list[str]:
    """Applies SGLang's meaning of `--dp-size` with `--enable-dp-attention`. Returns messages for the user."""
    count = values.get("dp_size", 1)
    if not values.get("enable_dp_attention") or "attn_dp_size" in values or count == 1:
        return []
    values["attn_dp_size"], origins["attn_dp_size"] = count, origins["enable_dp_attention"]
    del values["dp_size"]
    return [
        f"{origins.pop('dp_size')} {count} is read as --attn-dp-size {count}: {origins['enable_dp_attention']} is given"
    ]


def load_config(
    given: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    file: str = "",
    profile: str = "",
    as_flags: bool = False,
) -> Loaded:
    """Merges the layers and checks the result. `given` may use aliases. Raises `ConfigError`.

    `file` and `profile` may also come from the variables BOUGH_CONFIG and BOUGH_PROFILE, and the profile from the file.
    """
    notes: list[str] = []
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}

    def apply(layer: Mapping[str, object], name_origin: Any) -> None:
        for name, raw in layer.items():
            origin = name_origin(name)
            theirs = None if is_setting(name) else take(name.replace("-", "_"), raw, origin)
            if theirs is not None:
                notes.append(theirs.said)
                if not theirs.target:
                    continue
                name, raw = theirs.target, theirs.value
            setting, alias = lookup(name)
            values[setting.name] = _value(setting, alias, raw, origin)
            origins[setting.name] = origin
            word = value_word(setting, raw)
            if word is not None and word.note:
                notes.append(f"{origin} {raw} is read as {word.value}: {word.note}")

    file = file or environ.get(ENV_PREFIX + "CONFIG", "")
    from_file = read_file(file) if file else {}
    profile = str(profile or environ.get(ENV_PREFIX + "PROFILE", "") or from_file.pop("profile", "") or "balanced")
    from_file.pop("profile", None)
    apply(preset(profile), lambda name: f"profile {profile}")
    from_environment = _from_environment(environ, notes)
    chosen = {name.replace("-", "_") for layer in (from_file, from_environment, given) for name in layer}
    if not chosen & {*MACHINE_SETTINGS, "nccl_init_addr"}:
        apply(machine_variables(environ), lambda name: f"{name} of this machine's variables")
    apply(from_file, lambda name: f"{name} in {Path(file).name}")
    apply({name: environ[each] for each, name in OTHER_VARIABLES.items() if each in environ}, _other_variable)
    apply(from_environment, lambda name: ENV_PREFIX + name.upper())
    apply(given, lambda name: "--" + name.replace("_", "-") if as_flags else name)
    _spread_speculative_config(values, origins)
    notes += _attention_replicas(values, origins)
    config = assemble(values)
    check(config)
    return Loaded(config=config, origins=origins, notes=tuple(notes))


def _other_variable(name: str) -> str:
    return next(each for each, target in OTHER_VARIABLES.items() if target == name)


def build_config(**kwargs: Any) -> Config:
    """`build_config(model_path=..., tp_size=2) -> Config`. Takes every setting and every alias, and `config` (a YAML file)
    and `profile`; `BOUGH_*` variables fill in what is not given. Raises `ConfigError`, naming the nearest setting for an
    unknown name."""
    file = str(kwargs.pop("config", "") or "")
    profile = str(kwargs.pop("profile", "") or "")
    return load_config(kwargs, environ=os.environ, file=file, profile=profile).config


class ServerArgs:
    """A flat view of a `Config`: `ServerArgs(model_path="...", tp_size=2).tp_size`. Immutable; aliases read and write."""

    __slots__ = ("config",)

    config: Config

    def __init__(self, **kwargs: Any) -> None:
        object.__setattr__(self, "config", build_config(**kwargs))

    @classmethod
    def of(cls, config: Config) -> ServerArgs:
        """The flat view of an existing configuration."""
        args = cls.__new__(cls)
        object.__setattr__(args, "config", config)
        return args

    def __getattr__(self, name: str) -> Value:
        known = settings()
        alias = ALIASES.get(name)
        if name not in known and alias is None:
            raise AttributeError(f"ServerArgs has no {name!r}; did you mean {nearest(name)!r}?")
        setting = known[name if alias is None else alias.target]
        value: Value = getattr(getattr(self.config, setting.group), setting.name)
        return (not value) if alias is not None and alias.inverted else value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ServerArgs is immutable: use replace({name}=...)")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ServerArgs) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)

    def __repr__(self) -> str:
        changed = {name: value for name, value in flat(self.config).items() if value != settings()[name].default}
        return f"ServerArgs({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def replace(self, **changes: Any) -> ServerArgs:
        """A copy with some settings changed (aliases allowed)."""
        merged = flat(self.config)
        for name, raw in changes.items():
            setting, alias = lookup(name)
            merged[setting.name] = _value(setting, alias, raw, name)
        config = assemble(merged)
        check(config)
        return ServerArgs.of(config)

    def to_dict(self) -> dict[str, Value]:
        """Every setting by name."""
        return flat(self.config)


def flat(config: Config) -> dict[str, Value]:
    """Every setting of a configuration by name."""
    return {name: getattr(getattr(config, setting.group), name) for name, setting in settings().items()}


def public(config: Config) -> dict[str, Value]:
    """All settings except secrets, by name."""
    return {name: value for name, value in flat(config).items() if name not in SECRETS}


def public_json(config: Config) -> dict[str, bool | int | float | str]:
    """Like `public`, for JSON: values other than numbers and strings are written as on the command line."""
    return {
        name: value if isinstance(value, bool | int | float | str) else show_value(value)
        for name, value in public(config).items()
    }


def assemble(values: Mapping[str, Value]) -> Config:
    """A `Config` from settings by name; the others keep their defaults."""
    by_group: dict[str, dict[str, Value]] = {}
    for name, value in values.items():
        by_group.setdefault(settings()[name].group, {})[name] = value
    base = Config()
    changed = {group: dataclasses.replace(getattr(base, group), **items) for group, items in by_group.items()}
    return dataclasses.replace(base, **changed)


def read_file(path: str) -> dict[str, object]:
    """Settings in a YAML file: flat, or nested by concern, dashes or underscores. Raises `ConfigError`."""
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            what=f"can't read the configuration file {path}",
            why=error.strerror or "it can't be opened",
            fix="check the path given with --config",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            what=f"the configuration file {path} is not YAML",
            why=" ".join(str(error).split()),
            fix="write one `name: value` a line, for example `port: 8000`",
        ) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            what=f"the configuration file {path} holds a {type(loaded).__name__}",
            why="settings are read from a mapping of names to values",
            fix="write one `name: value` a line, for example `port: 8000`",
        )
    found: dict[str, object] = {}
    concern_names = {field.name for field in dataclasses.fields(Config)}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name in concern_names and isinstance(value, dict):
            found.update({str(inner).replace("-", "_"): each for inner, each in value.items()})
        else:
            found[name] = value
    return found


def dump_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The configuration as a file that `--config` reads back to the same one. Keys are left out (they are secrets)."""
    import yaml

    lines: list[str] = []
    group = ""
    for name, setting in settings().items():
        if setting.group != group:
            group = setting.group
            lines.append(f"# {group}")
        if name in SECRETS:
            lines.append(f"# {name}: not written here; set {setting.variable}")
            continue
        value = getattr(getattr(config, group), name)
        plain: object = list(value) if isinstance(value, tuple) else value
        if not isinstance(plain, bool | int | float | str | list):
            plain = show_value(value)
        text = (
            f"{name}: {json.dumps(plain)}"
            if isinstance(plain, list)
            else yaml.safe_dump({name: plain}, width=4096).strip()
        )
        origin = (origins or {}).get(name)
        lines.append(text + (f"  # {origin}" if origin else ""))
    return "\n".join(lines) + "\n"


def _value(setting: Setting, alias: Alias | None, raw: object, origin: str) -> Value:
    value = parse_value(setting, raw, origin)
    return (not value) if alias is not None and alias.inverted else value


def _from_environment(environ: Mapping[str, str], notes: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    known = {*settings(), *ALIASES}
    for variable, raw in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in known:
            found[name] = raw
        elif name not in ("config", "profile") and (near := nearest(name, cutoff=0.85)):
            notes.append(f"the variable {variable} is no setting; did you mean {ENV_PREFIX}{near.upper()}?")
    return found
