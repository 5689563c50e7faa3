"""Models from the hub: brought into the local cache, with word of how many bytes have come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bough.core.errors import ConfigError

Progress = Callable[[int, int], None]
"""Hears of bytes that are there, and of bytes in all. Called from another thread."""

_LOOK_EVERY_S: Final = 0.5
_LAST_LOOK_S: Final = 5.0
"""For the watcher to say that all is there. It takes so long only where the hub does not answer it."""


def download(
    model: str, revision: str, patterns: list[str], ignored: list[str], progress: Progress | None = None
) -> Path:
    """The directory with the model's files. Without `progress` the hub's own bars are shown. Raises `ConfigError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    watched = contextlib.nullcontext() if progress is None else _watched(model, revision, patterns, ignored, progress)
    try:
        with watched:
            found = snapshot_download(
                model, revision=revision or None, allow_patterns=patterns, ignore_patterns=ignored
            )
    except GatedRepoError as error:
        raise ConfigError(
            what=f"{model} is a gated model",
            why="its terms have to be accepted on the hub first",
            fix="accept them there, then set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(what=f"{model} has no revision {revision!r}", fix="check --revision") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            what=f"there is no model {model}",
            why="it is neither a path on this machine nor a model on the hub that this user can see",
            fix="check the name; for a private model set HF_TOKEN",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            what=f"{model} is not on this machine and the hub can't be reached",
            why=first_line(error),
            fix="check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or name a local directory or .gguf file",
        ) from error
    return Path(found)


@contextlib.contextmanager
def _watched(model: str, revision: str, patterns: list[str], ignored: list[str], progress: Progress) -> Iterator[None]:
    """Looks at the cache's files as they grow. Whatever keeps it from doing so does not keep the download from going on."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    done = threading.Event()

    def watch() -> None:
        sizes = _sizes(model, revision, patterns, ignored)
        total = sum(sizes.values())
        if not sizes or _present(model, sizes) == total:
            return
        while not done.wait(_LOOK_EVERY_S):
            progress(_present(model, sizes), total)
        if _present(model, sizes) == total:
            progress(total, total)

    silent = are_progress_bars_disabled()
    disable_progress_bars()
    watcher = threading.Thread(target=watch, name="download-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join(_LAST_LOOK_S)
        if not silent:
            enable_progress_bars()


def _sizes(model: str, revision: str, patterns: list[str], ignored: list[str]) -> dict[str, int]:
    """Bytes of each wanted file, by the name it has among the cache's blobs. Empty if the hub does not say."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    with contextlib.suppress(Exception):  # the download itself says what is wrong
        files = HfApi().model_info(model, revision=revision or None, files_metadata=True).siblings or []
        wanted = filter_repo_objects(
            files, allow_patterns=patterns, ignore_patterns=ignored, key=lambda file: file.rfilename
        )
        return {(file.lfs.sha256 if file.lfs else file.blob_id or ""): file.size or 0 for file in wanted}
    return {}


def _present(model: str, sizes: dict[str, int]) -> int:
    """Bytes of the wanted files that are on disk, unfinished ones included."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=model, repo_type="model") / "blobs"
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for path in blobs.iterdir():
            name = path.name.partition(".")[0]
            if name in sizes:
                with contextlib.suppress(OSError):
                    found[name] = max(found.get(name, 0), min(path.stat().st_size, sizes[name]))
    return sum(found.values())


def first_line(error: Exception) -> str:
    """What an error says, without what follows."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
