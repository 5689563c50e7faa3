"""Opens a checkpoint: finds its files (a directory, a hub id, a .gguf file, the embedded model) and reads what they say.

Only headers and JSON are read; weights stay on disk. Nothing here needs torch or transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from bough.config.adapter_folders import adapter_tensor
from bough.config.concerns import ModelConfig
from bough.config.default_model import DEFAULT_MODEL_NAME, default_model_path, is_default_model
from bough.config.download import Progress, download
from bough.config.fields import Fields
from bough.config.gguf_config import config_from_gguf, generation_config_from_gguf
from bough.config.gguf_header import GgufHeader, TensorInfo, read_gguf_header
from bough.config.hub_files import first_line
from bough.config.hub_name import parse_hub_name
from bough.config.internvl_config import from_own
from bough.config.lora_paths import parse_paths, read_paths
from bough.config.mistral_config import config_from_params
from bough.config.phi4mm_config import adapter_files, from_phi4mm
from bough.config.sharded import Shards, read_manifest
from bough.core.errors import ConfigError, UnsupportedModel

CheckpointKind = Literal["safetensors", "gguf", "config-only"]

_DEFAULT_SAMPLING: Final[dict[str, Any]] = {"temperature": 0.2, "top_p": 0.9}
"""Recommendation of the authors of the default model; its GGUF file does not contain it."""
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_QUANTIZATION_FILES: Final = {
    "hf_quant_config.json": "modelopt",
    "quant_config.json": "awq",
    "quantize_config.json": "gptq",
}
"""Files that older writers keep their configuration in, and the method each stands for."""
_SPLIT: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class StoredShape:
    """One tensor as it lies in the checkpoint."""

    kind: str
    """F32, BF16, Q4_1 ..."""
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk."""

    name: str
    """Default name for clients."""
    kind: CheckpointKind
    path: Path
    """The directory or the .gguf file."""
    config: dict[str, Any]
    """The config in Hugging Face's form, also for GGUF files."""
    generation_config: dict[str, Any]
    files: tuple[Path, ...]
    """The files with the weights; empty for a config alone."""
    tokenizer: Path
    """Where the tokenizer is: a directory or a .gguf file."""
    gguf: tuple[GgufHeader, ...] = field(default=(), repr=False)
    """The headers of `files`, if they are GGUF."""
    shards: Shards | None = field(default=None, repr=False)
    """How it was cut into one file per rank, if it was (`bough shard`)."""
    adapters: tuple[tuple[str, Path], ...] = ()
    """Names and files of adapters that do not lie in `files`."""

    @property
    def architecture(self) -> str:
        """Raises `UnsupportedModel` if the config names none."""
        return Fields(self.config).architecture()

    @property
    def vocab(self) -> int:
        """Raises `ConfigError` if the config doesn't say."""
        return Fields(self.config).count("vocab_size")

    @property
    def is_consolidated(self) -> bool:
        """Whether it is in Mistral's own layout, with names of its own."""
        if self.shards is not None:
            return self.shards.consolidated
        return bool(self.files) and self.files[0].name.startswith("consolidated")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: those of the generation config and of the config."""
        ids: list[int] = []
        for source in (self.generation_config, self.config):
            value = source.get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(ids))

    @property
    def recommended_sampling(self) -> dict[str, Any]:
        """Sampling parameters that the model's authors recommend, by their native names."""
        given = self.generation_config
        if given.get("do_sample") is False:
            return {"temperature": 0.0}
        found = {name: given[name] for name in _SAMPLING if isinstance(given.get(name), int | float)}
        if found.get("top_k") == 0:
            found["top_k"] = -1
        return found

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """The quantization config as the checkpoint has it; empty if the weights are not quantised, or in a GGUF
        file."""
        inner = self.config.get("text_config")
        for found in (self.config, inner if isinstance(inner, dict) else {}):
            given = found.get("quantization_config")
            if isinstance(given, dict) and given:
                return given
        if self.path.is_dir():
            for name, method in _QUANTIZATION_FILES.items():
                read = _read_json(self.path / name)
                if read is not None:
                    return {"quant_method": method, **read}
        return {}

    @cached_property
    def tensors(self) -> dict[str, StoredShape]:
        """All tensors by the name the file gives them, from headers alone; those of adapters as `adapter_tensor` says."""
        beside = {
            adapter_tensor(adapter, name): shape
            for adapter, path in self.adapters
            for name, shape in _safetensors_shapes(path).items()
        }
        return {**self._own_tensors(), **beside}

    def _own_tensors(self) -> dict[str, StoredShape]:
        if self.kind == "gguf":
            return {
                name: StoredShape(info.kind, info.shape, info.nbytes)
                for header in self.gguf
                for name, info in header.tensors.items()
            }
        if self.shards is not None:
            return {name: StoredShape(of.kind, of.shape, of.nbytes) for name, of in self.shards.tensors.items()}
        return {name: shape for path in self.files for name, shape in _safetensors_shapes(path).items()}


class _Packed(Struct, array_like=True):
    """A checkpoint as it is sent to another process."""

    name: str
    kind: CheckpointKind
    path: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    files: list[str]
    tokenizer: str
    gguf: list[tuple[dict[str, Any], dict[str, TensorInfo], int]]
    tensors: dict[str, StoredShape]
    shards: Shards | None = None
    adapters: list[tuple[str, str]] = []


def pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Everything that was read of it, so that `unpack_checkpoint` needs no file."""
    return msgspec.msgpack.encode(
        _Packed(
            checkpoint.name,
            checkpoint.kind,
            str(checkpoint.path),
            checkpoint.config,
            checkpoint.generation_config,
            [str(path) for path in checkpoint.files],
            str(checkpoint.tokenizer),
            [(header.metadata, header.tensors, header.data_offset) for header in checkpoint.gguf],
            {} if checkpoint.kind == "gguf" else checkpoint.tensors,
            checkpoint.shards,
            [(name, str(path)) for name, path in checkpoint.adapters],
        )
    )


def unpack_checkpoint(packed: bytes) -> Checkpoint:
    """Raises `ValueError` for bytes that `pack_checkpoint` did not make."""
    given = msgspec.msgpack.decode(packed, type=_Packed)
    checkpoint = Checkpoint(
        name=given.name,
        kind=given.kind,
        path=Path(given.path),
        config=given.config,
        generation_config=given.generation_config,
        files=tuple(Path(path) for path in given.files),
        tokenizer=Path(given.tokenizer),
        gguf=tuple(GgufHeader(*header) for header in given.gguf),
        shards=given.shards,
        adapters=tuple((name, Path(path)) for name, path in given.adapters),
    )
    if given.kind != "gguf":
        vars(checkpoint)["tensors"] = given.tensors
    return checkpoint


def open_checkpoint(
    model: str,
    *,
    revision: str = "",
    load_format: str = "auto",
    overrides: str = "",
    download_dir: str = "",
    processor: str = "",
    language_model_only: bool = False,
    lora_paths: Sequence[str] = (),
    max_loras: int = 8,
    max_lora_rank: int = 512,
    progress: Progress | None = None,
) -> Checkpoint:
    """Finds `model` and reads its headers; downloads it first if it is a hub id that is not in the cache.

    `overrides` is a JSON object merged into the config, `processor` one merged into the settings of its media processor.
    `language_model_only` is noted in the config. `load_format="dummy"` needs only a config. `download_dir`: instead of the
    hub's cache. `lora_paths`: adapters that requests may name, `max_loras` at most, of rank `max_lora_rank` at most.
    `progress` is called with the progress of a download.
    """
    adapters = parse_paths(lora_paths)
    patch = _parse_overrides(overrides, "--json-model-override-args")
    given = _parse_overrides(processor, "--mm-processor-kwargs")
    if language_model_only:
        patch = {**patch, "language_model_only": True}
    path = _locate(model, revision, load_format, progress, download_dir)
    name = _display_name(model, path)
    lone = path if path.is_file() else _lone_gguf(path)
    if lone is not None:
        checkpoint = _open_gguf(lone, name, load_format, patch)
    else:
        checkpoint = _open_directory(path, name, load_format, patch)
    if adapters:
        known, files = read_paths(adapters, most=max_loras, most_rank=max_lora_rank)
        kept = () if load_format == "dummy" else files
        checkpoint = replace(checkpoint, config={**checkpoint.config, **known}, adapters=(*checkpoint.adapters, *kept))
    if given and "processor_config" in checkpoint.config:
        found = checkpoint.config["processor_config"]
        for part in ("image_processor", "video_processor"):
            if part in found:
                found[part] = {**found[part], **given}
    return checkpoint


def checkpoint_of(model: ModelConfig, progress: Progress | None = None) -> Checkpoint:
    """The checkpoint that a configuration names, opened by `open_checkpoint`."""
    return open_checkpoint(
        model.model,
        revision=model.revision,
        load_format=model.load_format,
        overrides=model.json_model_override_args,
        download_dir=model.download_dir,
        processor=model.mm_processor_kwargs,
        language_model_only=model.language_model_only,
        lora_paths=model.lora_paths if model.enable_lora else (),
        max_loras=model.max_loras_per_batch,
        max_lora_rank=model.max_lora_rank,
        progress=progress,
    )


def _parse_overrides(overrides: str, flag: str) -> dict[str, Any]:
    if not overrides:
        return {}
    try:
        patch = json.loads(overrides)
    except ValueError as error:
        raise ConfigError(what=f"{flag} is no JSON", why=str(error)) from error
    if not isinstance(patch, dict):
        raise ConfigError(what=f"{flag} must be a JSON object", why=f"it is {patch!r}")
    return patch


def _display_name(model: str, path: Path) -> str:
    if not model or is_default_model(path):
        return DEFAULT_MODEL_NAME
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if Path(model).exists() else model


def _locate(model: str, revision: str, load_format: str, progress: Progress | None, download_dir: str) -> Path:
    if not model:
        return default_model_path(progress)
    path = Path(model).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ConfigError(
                what=f"{model} is a file that can't be served",
                why="a single file must be a .gguf",
                fix="name the directory that holds config.json and the weights",
            )
        return path
    name = parse_hub_name(model)
    if name is None or model.startswith(("/", ".", "~")) or model.endswith(".gguf"):
        raise ConfigError(what=f"there is no model at {model}", why="the path does not exist", fix="check the path")
    return download(name, revision, weights=load_format != "dummy", progress=progress, into=download_dir)


def _lone_gguf(path: Path) -> Path | None:
    """A directory without config.json but with one GGUF model stands for that model."""
    if (path / "config.json").exists():
        return None
    found = [file for file in sorted(path.glob("*.gguf")) if not file.name.startswith("mmproj")]
    first = [file for file in found if not (match := _SPLIT.fullmatch(file.name)) or match[2] == "00001"]
    if len(first) > 1:
        raise ConfigError(
            what=f"{path} holds several models",
            why=", ".join(file.name for file in first),
            fix="name the .gguf file to serve",
        )
    return first[0] if first else None


def _open_gguf(path: Path, name: str, load_format: str, patch: Mapping[str, Any]) -> Checkpoint:
    if load_format == "safetensors":
        raise ConfigError(what=f"{path} holds no safetensors", fix="drop --load-format safetensors")
    files = _split_files(path)
    headers = tuple(read_gguf_header(file) for file in files)
    dummy = load_format == "dummy"
    embedded = is_default_model(path)
    return Checkpoint(
        name=name,
        kind="config-only" if dummy else "gguf",
        path=path,
        config={**config_from_gguf(headers, files), **patch},
        generation_config={**(_DEFAULT_SAMPLING if embedded else {}), **generation_config_from_gguf(headers[0])},
        files=() if dummy else files,
        tokenizer=path,
        gguf=() if dummy else headers,
    )


def _split_files(path: Path) -> tuple[Path, ...]:
    match = _SPLIT.fullmatch(path.name)
    if not match:
        return (path,)
    files = tuple(path.with_name(f"{match[1]}-{part:05d}-of-{match[3]}.gguf") for part in range(1, int(match[3]) + 1))
    if missing := [file.name for file in files if not file.exists()]:
        raise ConfigError(what=f"{path.name} is one of {match[3]} parts", why=f"missing: {', '.join(missing)}")
    return files


def _open_directory(path: Path, name: str, load_format: str, patch: Mapping[str, Any]) -> Checkpoint:
    if load_format == "gguf":
        raise ConfigError(what=f"{path} holds no .gguf file", fix="drop --load-format gguf")
    config = _read_json(path / "config.json")
    own_layout = config is None
    if config is None:
        params = _read_json(path / "params.json")
        if params is None:
            raise ConfigError(
                what=f"{path} is no model",
                why="it has no config.json, no params.json and no .gguf file",
                fix="check the path",
            )
        config = config_from_params(params)
    shards = None if load_format == "dummy" else read_manifest(path)
    if shards is not None:
        files = shards.files(path)
    elif load_format == "dummy":
        files = ()
    else:
        files = _safetensors_files(path, "consolidated" if own_layout else "model")
    return Checkpoint(
        name=name,
        kind="config-only" if load_format == "dummy" else "safetensors",
        path=path,
        config={**processor_config(path), **with_text_config(from_phi4mm(from_own(config, path), path)), **patch},
        generation_config=_read_json(path / "generation_config.json") or {},
        files=files,
        tokenizer=path,
        shards=shards,
        adapters=() if load_format == "dummy" or shards is not None else adapter_files(config, path),
    )


def with_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a multimodal model, with its `text_config` merged into it and its kind as `text_model_type`. Other
    configs are returned unchanged. For models that also speak (Qwen's Omni models) it is the config of the thinker."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, dict):
        named = [
            str(name).replace("OmniModel", "OmniForConditionalGeneration") for name in config.get("architectures") or ()
        ]
        outer: dict[str, Any] = {
            key: config[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in config
        }
        config = {**thinker, **outer, "architectures": named, "model_type": config.get("model_type")}
    text = config.get("text_config")
    names = config.get("architectures")
    sees = isinstance(names, list) and any(str(name).endswith("ForConditionalGeneration") for name in names)
    if (
        not sees
        or not isinstance(text, dict)
        or config.get("hidden_size", text.get("hidden_size")) != text.get("hidden_size")
    ):
        return config
    kind = str(text.get("model_type") or "")
    kept = {key: config[key] for key in ("architectures", "model_type", "tie_word_embeddings") if key in config}
    return {**config, **text, **kept, "text_model_type": kind}


def processor_config(path: Path) -> dict[str, Any]:
    """What a checkpoint's files say about how media become features, as `{"processor_config": {...}}`: the processor's own
    settings, and under `image_processor`, `video_processor` and `feature_extractor` those of its parts. Empty if the model
    takes text only."""
    found = dict(_read_json(path / "processor_config.json") or {})
    for part, name in (
        ("image_processor", "preprocessor_config.json"),
        ("video_processor", "video_preprocessor_config.json"),
    ):
        given = _read_json(path / name)
        if given is not None and part not in found:
            found[part] = given
    return {"processor_config": found} if found else {}


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(what=f"{path} is no JSON", why=str(error), fix="download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(what=f"{path} is no JSON object", fix="download it again")
    return value


def _safetensors_files(path: Path, stem: str) -> tuple[Path, ...]:
    """The files with the weights. `stem`: how their names begin where there is an index; "consolidated" files are those of
    Mistral's own layout, and no part of any other."""
    index = _read_json(path / f"{stem}.safetensors.index.json")
    if index is not None:
        names = sorted(set((index.get("weight_map") or {}).values()))
        if missing := [name for name in names if Path(name).name != name or not (path / name).exists()]:
            raise ConfigError(
                what=f"{path} is incomplete", why=f"missing: {', '.join(missing)}", fix="download it again"
            )
        return tuple(path / name for name in names)
    own = stem == "consolidated"
    files = tuple(file for file in sorted(path.glob("*.safetensors")) if file.name.startswith("consolidated") == own)
    if files:
        return files
    pickled = any(path.glob("*.bin")) or any(path.glob("*.pth"))
    raise UnsupportedModel(
        what=f"{path} has no safetensors weights",
        why="pickled weights (.bin, .pth) are not loaded: they can run code" if pickled else "no weights were found",
        fix="convert them to safetensors, or use --load-format dummy for random ones",
    )


def _safetensors_shapes(path: Path) -> dict[str, StoredShape]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: StoredShape(
                    part.get_dtype(), tuple(part.get_shape()), _nbytes(part.get_dtype(), part.get_shape())
                )
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            what=f"{path} is no sound safetensors file", why=first_line(error), fix="download it again"
        ) from error


def _nbytes(dtype: str, shape: list[int]) -> int:
    bits = int(re.sub(r"\D", "", dtype.split("_")[0]) or 8)  # F32, BF16, F8_E4M3, I64, BOOL
    return _product(tuple(shape)) * bits // 8


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total
