"""Checkpoints on the Hugging Face Hub: which files are fetched, and in which order.

The config comes first, so that a model that cannot run is refused before gigabytes are on their way. Then the tokenizer's
files and safetensors, from the repository's top folder only, all of one commit. Code is never asked for; nor is a pickle,
but for Parcae's, which is released in no other form.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loopscope.errors import CheckpointError, LoopscopeError, UnknownModelError
from loopscope.models.registry import family_of
from loopscope.models.tensors import INDEX, PICKLE, Stored, element_bytes, read_json, shards_of, weight_files
from loopscope.text import TEXT_FILES

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repo_id(source: Any) -> bool:
    """Whether source can be a Hub id: text of the form 'organisation/name'."""
    if not isinstance(source, str) or not _REPO_ID.fullmatch(source):
        return False
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def fetch_checkpoint(repo_id: str, revision: str | None = None) -> Path:
    """The folder of a repository's files in the Hub's own cache, named by the commit, after what is missing was fetched.

    revision: branch, tag or commit; default: the main branch. What the cache holds already is used offline too.
    Raises UnknownModelError where repository or revision cannot be had, or its family is not supported; CheckpointError
    where the repository is no checkpoint that can be read.
    """
    with _errors(repo_id, revision):
        api, commit, config = _config(repo_id, revision)
        raw = read_json(config)
        family = family_of(raw)
        fetch = partial(api.snapshot_download, repo_id, revision=commit)
        folder = Path(fetch(allow_patterns=[*TEXT_FILES, "config.json", INDEX]))
        files = _weights(repo_id, _names(api, repo_id, commit, folder), folder, family)
        return Path(fetch(allow_patterns=[*TEXT_FILES, "config.json", INDEX, *map(glob.escape, files)]))


def peek(repo_id: str, revision: str | None = None) -> tuple[dict, dict[str, Stored] | None]:
    """A repository's config.json and, where it has safetensors, its tensors' names and shapes, which cannot be read.

    A few kilobytes are fetched, whatever the model's size. Raises as fetch_checkpoint.
    """
    with _errors(repo_id, revision):
        api, commit, config = _config(repo_id, revision)
        raw, folder = read_json(config), config.parent
        family = family_of(raw)
        names = _names(api, repo_id, commit, folder)
        if INDEX in names:
            api.hf_hub_download(repo_id, INDEX, revision=commit)
        found: dict[str, Stored] = {}
        for file in _weights(repo_id, names, folder, family):
            if file == PICKLE:
                return raw, None
            header = api.parse_safetensors_file_metadata(repo_id, file, revision=commit)
            for name, info in header.tensors.items():
                shape = tuple(info.shape)
                found[name] = Stored(Path(repo_id) / file, name, shape, info.parameter_count * element_bytes(info.dtype), _unread)
        return raw, found


def _unread(start: int, stop: int) -> torch.Tensor:
    raise CheckpointError("only its header was fetched")


def _config(repo_id: str, revision: str | None):
    """(api, commit, path of config.json). All that follows asks for that commit: a branch may move between two calls."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    api = HfApi(library_name="loopscope")
    commit = api.resolve_revision(repo_id, revision=revision).resolved
    try:
        return api, commit, Path(api.hf_hub_download(repo_id, "config.json", revision=commit))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError as error:
        raise CheckpointError(f"{repo_id} on the Hub has no config.json, so it is not a checkpoint") from error


def _names(api, repo_id: str, commit: str, folder: Path) -> list[str]:
    """Files in the repository's top folder; those that the cache holds where the Hub cannot be asked."""
    try:
        names = api.list_repo_files(repo_id, revision=commit)
    except Exception:  # offline, in any of several libraries' ways: what is not in the cache is missed, and said, later
        names = os.listdir(folder)
    return [name for name in names if "/" not in name]


def _weights(repo_id: str, names: list[str], folder: Path, family: str) -> list[str]:
    """Which weight files to fetch. Raises CheckpointError where there are none that may be."""
    if INDEX in names and (folder / INDEX).is_file():
        return shards_of(folder / INDEX)
    if files := weight_files([name for name in names if name.endswith(".safetensors")]):
        return files
    if family == "parcae" and PICKLE in names:
        return [PICKLE]
    raise CheckpointError(f"{repo_id} on the Hub has no *.safetensors file (found: {', '.join(sorted(names)[:8])}); pickled weights "
                          "are never fetched" + (", but for Parcae's " + PICKLE if family == "parcae" else ""))


@contextmanager
def _errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """One LoopscopeError for whatever the Hub, its client or the network has to say."""
    from huggingface_hub import errors

    what = f"{repo_id} on the Hub" + (f" at revision {revision!r}" if revision else "")
    try:
        yield
    except LoopscopeError:
        raise
    except errors.GatedRepoError as error:
        raise UnknownModelError(f"{what} is gated: its owners have to grant you access first (ask on its page, then log in with "
                                "`hf auth login`)") from error
    except errors.RepositoryNotFoundError as error:
        raise UnknownModelError(f"{repo_id!r} is neither a shipped model nor a folder here, and the Hub has no such repository, or a "
                                "private one (then log in with `hf auth login`)") from error
    except errors.RevisionNotFoundError as error:
        raise UnknownModelError(f"{repo_id} on the Hub has no revision {revision!r}; give a branch, a tag or a commit") from error
    except (errors.RevisionResolutionError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UnknownModelError(f"{repo_id!r} is neither a shipped model nor a folder here, and as a Hub id it could not be fetched: the "
                                f"Hub cannot be reached, and the cache does not hold all of it ({_first(error)}); check the connection, or "
                                "give a folder") from error
    except Exception as error:  # the client lets several libraries' exceptions through
        raise UnknownModelError(f"{what} could not be fetched: {type(error).__name__}: {_first(error)}") from error


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def commit_of(folder: Path) -> str | None:
    """The commit of a folder that fetch_checkpoint gave; None for other folders."""
    return folder.name if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--") else None

