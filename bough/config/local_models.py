"""Models in the local cache of the hub: listed with their sizes, and removed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bough.config.hub_name import HubName
from bough.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model that can be served without a download."""

    name: str
    """What `bough serve` takes: `org/repo`, or `org/repo:TAG` for one of several GGUF files."""
    format: str
    """safetensors, GGUF, or "incomplete" if no weights are there."""
    size: int
    """Bytes on disk, files that several models share counted for each."""
    modified: float
    """Seconds since 1970."""
    path: Path
    """The directory or the GGUF file."""


def local_models() -> list[LocalModel]:
    """Every model in the cache, by name."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [repo for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    found: list[LocalModel] = []
    for repo in sorted(repos, key=lambda each: each.repo_id.lower()):
        for revision in repo.revisions:
            found += _models_of(repo.repo_id, revision.snapshot_path, revision.last_modified, revision.files)
    newest: dict[str, LocalModel] = {}
    for model in sorted(found, key=lambda each: each.modified):
        newest[model.name] = model
    return sorted(newest.values(), key=lambda each: each.name.lower())


def _models_of(repo: str, folder: Path, modified: float, files: Iterable[object]) -> list[LocalModel]:
    sizes: dict[str, int] = {}
    for file in files:
        path: Path = file.file_path  # type: ignore[attr-defined]
        sizes[str(path.relative_to(folder))] = file.size_on_disk  # type: ignore[attr-defined]
    ggufs = sorted(name for name in sizes if name.endswith(".gguf"))
    if any(name.endswith(".safetensors") for name in sizes):
        others = sum(size for name, size in sizes.items() if name not in ggufs)
        return [LocalModel(repo, "safetensors", others, modified, folder)]
    if not ggufs:
        return [LocalModel(repo, "incomplete", sum(sizes.values()), modified, folder)]
    first_parts = [name for name in ggufs if "-of-" not in name or "-00001-of-" in name]
    return [
        LocalModel(
            repo if len(first_parts) == 1 else str(HubName(repo, Path(name).stem.partition("-00001-of-")[0])),
            "GGUF",
            sum(size for other, size in sizes.items() if other.startswith(name.partition("-00001-of-")[0])),
            modified,
            folder / name,
        )
        for name in first_parts
    ]


def remove_model(name: HubName) -> int:
    """Removes a repository, or with a tag one GGUF model of it, from the cache. Returns the bytes freed.

    Raises `ConfigError` if it is not there.
    """
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        raise _absent(name) from None
    repo = next((each for each in cache.repos if each.repo_type == "model" and each.repo_id == name.repo), None)
    if repo is None:
        raise _absent(name)
    if not name.tag:
        strategy = cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
        strategy.execute()
        return strategy.expected_freed_size
    from bough.config.hub_files import wanted_files

    freed = 0
    for revision in repo.revisions:
        by_name = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
        for chosen in wanted_files(name, list(by_name)):
            file = by_name[chosen]
            freed += file.size_on_disk
            file.file_path.unlink(missing_ok=True)
            file.blob_path.unlink(missing_ok=True)
    return freed


def _absent(name: HubName) -> ConfigError:
    return ConfigError(
        what=f"{name} is not on this machine",
        why="the cache of the hub has no such model",
        fix="`bough models` lists those that are there",
    )
