"""The files of a repository on the hub, and which of them a model needs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Final

from bough.config.hub_name import HubName
from bough.core.errors import ConfigError

_METADATA: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_WEIGHTS: Final = "*.safetensors"
_IGNORED: Final = ("original/*", "consolidated*")
_OWN_LAYOUT: Final = ("params.json", "consolidated*")
"""Mistral's own layout, which counts where there is no config.json."""
_TAGS: Final = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0", "BF16", "F16")
"""Which GGUF file a repository's name stands for if no tag is given, best first: 4 bits in the format that most
repositories have, then its neighbours."""
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository."""

    name: str
    size: int
    sha256: str
    """Of large files (LFS); empty for small ones."""
    git_sha1: str
    """Of small files: the id that git gives their content."""

    @property
    def blob(self) -> str:
        """The name of its content in the local cache."""
        return self.sha256 or self.git_sha1


def list_files(repo: str, revision: str) -> list[HubFile]:
    """The files of a repository. Raises what `huggingface_hub` raises; see `explained`."""
    from huggingface_hub import HfApi

    found = HfApi().model_info(repo, revision=revision or None, files_metadata=True).siblings or []
    return [
        HubFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else "", each.blob_id or "")
        for each in found
    ]


def wanted_files(name: HubName, files: Sequence[str], *, weights: bool = True) -> list[str]:
    """Names of the files to serve this model from: one GGUF model, or configuration, tokenizer and safetensors.

    A tag selects a GGUF file. Without a tag, GGUF files are used only if there are no safetensors. `weights=False`
    omits safetensors. Raises `ConfigError` if the tag matches no file or several models.
    """
    kept = [file for file in files if not any(fnmatch(file, pattern) for pattern in _IGNORED)]
    if "config.json" not in files and "params.json" in files:
        kept += [file for file in files if any(fnmatch(file, pattern) for pattern in _OWN_LAYOUT) and file not in kept]
    ggufs = [file for file in kept if file.endswith(".gguf") and not file.rsplit("/", 1)[-1].startswith("mmproj")]
    if name.tag:
        return _tagged(name, ggufs)
    if ggufs and not any(fnmatch(file, _WEIGHTS) for file in kept):
        return _default(name, ggufs)
    patterns = (*_METADATA, _WEIGHTS) if weights else _METADATA
    return [file for file in kept if any(fnmatch(file, pattern) for pattern in patterns)]


def _tagged(name: HubName, ggufs: Sequence[str]) -> list[str]:
    # The tag is a word of the file's name: Q4_0 must not find Q4_0_4_4, nor Q4_K find Q4_K_M.
    word = re.compile(rf"(?<![0-9A-Za-z]){re.escape(name.tag)}(?![0-9A-Za-z_])", re.IGNORECASE)
    models = _models([file for file in ggufs if word.search(file)])
    if len(models) == 1:
        return next(iter(models.values()))
    if not models:
        tags = ", ".join(sorted({file.rsplit("/", 1)[-1] for file in _models(ggufs)})) or "none"
        raise ConfigError(
            what=f"{name.repo} has no GGUF file {name.tag}",
            why=f"its GGUF files are: {tags}",
            fix=f"name one of them, as in {name.repo}:Q4_K_M, or leave the tag out",
        )
    raise ConfigError(
        what=f"several files of {name.repo} match {name.tag}",
        why=", ".join(sorted(models)),
        fix="give more of the file's name as the tag",
    )


def _default(name: HubName, ggufs: Sequence[str]) -> list[str]:
    for tag in _TAGS:
        with contextlib.suppress(ConfigError):
            return _tagged(HubName(name.repo, tag), ggufs)
    models = _models(ggufs)
    if len(models) == 1:
        return next(iter(models.values()))
    raise ConfigError(
        what=f"{name.repo} holds several models",
        why=", ".join(sorted(models)),
        fix=f"say which one, as in {name.repo}:Q4_K_M",
    )


def _models(ggufs: Sequence[str]) -> dict[str, list[str]]:
    """Files that belong together, by the name of their first."""
    models: dict[str, list[str]] = {}
    for file in sorted(ggufs):
        first = _PART.sub(lambda part: f"-00001-of-{part[2]}.gguf", file)
        models.setdefault(first, []).append(file)
    return models


@contextlib.contextmanager
def explained(model: str, revision: str) -> Iterator[None]:
    """Turns the errors of `huggingface_hub` within into `ConfigError` with a fix; `HubUnreachable` if there is no hub."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
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
    except ConfigError:
        raise
    except Exception as error:
        known = isinstance(error, LocalEntryNotFoundError | HfHubHTTPError | OSError)
        if not known and not type(error).__module__.startswith(("httpx", "requests")):  # its HTTP client's, by version
            raise
        raise HubUnreachable(
            what=f"{model} is not on this machine and the hub can't be reached",
            why=first_line(error),
            fix="check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or name a local directory or .gguf file",
        ) from error


class HubUnreachable(ConfigError):
    """The hub does not answer, or was forbidden by HF_HUB_OFFLINE."""


def first_line(error: Exception) -> str:
    """What an error says, without what follows."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
