"""Compact models on the Hugging Face hub: `hf://USER/NAME` is fetched into the cache of huggingface_hub, once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hiap.errors import CheckpointError, InputError

__all__ = ["HUB", "check_name", "local_folder", "upload"]

HUB = "hf://"
FILES = ("config.json", "model.safetensors", "preprocessor_config.json", "processor_config.json")  # of a compact model
TOKEN = "run `hf auth login`, or put a token with write access into the variable HF_TOKEN"


def local_folder(name: str | os.PathLike[str]) -> Path:
    """The folder of a compact model; one on the hub is fetched first.

    Args:
        name: a folder, or hf://USER/NAME, or hf://USER/NAME@REVISION.

    Raises:
        CheckpointError: it is on the hub and cannot be had.
    """
    text = os.fspath(name)
    if not text.startswith(HUB):
        return Path(text)
    from huggingface_hub import errors, snapshot_download

    repo, _, revision = text.removeprefix(HUB).partition("@")
    try:
        check_name(repo)
        found = snapshot_download(repo, revision=revision or None, allow_patterns=list(FILES), endpoint=_endpoint())
    except InputError as error:
        raise CheckpointError(f"{text}: {error}") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{text}: the model has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:  # or a private one: the hub does not tell
        raise CheckpointError(f"{text}: there is no such model, or your token may not see it ({TOKEN})") from error
    except Exception as error:  # of several libraries, depending on the version
        raise CheckpointError(
            f"{text} is not in the cache, and the hub cannot be reached: {_first_line(error)}"
        ) from error
    return Path(found)


def check_name(repo: str) -> None:
    """Raise an InputError for what is not USER/NAME."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise InputError(f"a model on the hub is named USER/NAME; found {repo!r}")


def upload(
    folder: Path, repo: str, more: Mapping[str, str], private: bool = False, overwrite: bool = False, message: str = ""
) -> str:
    """Put a compact model on the hub, in one commit.

    Args:
        more: further text files by name.
        private: hide it. A public model that is there already is refused.
        overwrite: add a version to a model that is there. An empty one is filled without it.

    Returns:
        Its address.

    Raises:
        InputError: the name is malformed or taken, there is no token, or it may not write there.
        CheckpointError: the hub cannot be reached.
    """
    import huggingface_hub as hub

    check_name(repo)
    if hub.get_token() is None:
        raise InputError(f"the hub needs a token, and there is none here: {TOKEN}")
    api = hub.HfApi(endpoint=_endpoint(), library_name="hiap")
    adding: Any = hub.CommitOperationAdd
    files = [adding(name, str(folder / name)) for name in FILES if (folder / name).is_file()]
    files += [adding(name, text.encode()) for name, text in more.items()]
    try:
        url = _create(api, repo, private, overwrite)
        if private and not api.model_info(repo).private:
            raise InputError(f"{repo} is public: make it private in its settings on the hub first, or omit --private")
        api.create_commit(repo, files, commit_message=message or f"Add {repo.partition('/')[2]}")
    except InputError:
        raise
    except hub.errors.HfHubHTTPError as error:
        status = _status(error)
        if status == 409:
            raise InputError(f"{repo} is on the hub already: name another, or pass --overwrite to update it") from error
        if status in (401, 403):
            raise InputError(f"your token may not write to {repo} ({_first_line(error)}): {TOKEN}") from error
        raise CheckpointError(f"the hub refuses {repo}: {_first_line(error)}") from error
    except Exception as error:  # of several libraries, depending on the version
        raise CheckpointError(f"{repo} could not be uploaded; can the hub be reached? {_first_line(error)}") from error
    return url


def _create(api: Any, repo: str, private: bool, overwrite: bool) -> str:
    """The address of a model that may be written to: a new one, or an empty one that a failed upload has left."""
    from huggingface_hub import errors

    try:
        return str(api.create_repo(repo, private=private, exist_ok=overwrite))
    except errors.HfHubHTTPError as error:
        if _status(error) != 409 or set(api.list_repo_files(repo)) - {".gitattributes"}:
            raise
        return str(api.create_repo(repo, private=private, exist_ok=True))


def _status(error: Any) -> int | None:
    return error.response.status_code if error.response is not None else None


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")  # huggingface_hub reads it only once


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line]
    return lines[0][:300] if lines else type(error).__name__
