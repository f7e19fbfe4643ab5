"""Upload a folder to the Hugging Face hub, at the endpoint in HF_ENDPOINT."""

from __future__ import annotations

from pathlib import Path

from ranker.errors import ConfigError, DataError
from ranker.network import unreachable


def check_hub(name: str) -> None:
    """Check before the work that an upload can succeed: the name is valid, there is a token, and the hub answers.

    Args:
        name: The model's id, `OWNER/NAME`.

    Raises:
        ConfigError: One of these three conditions does not hold.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"to: expected hub:OWNER/NAME, got 'hub:{name}'; {' '.join(str(error).split())}") from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("to: expected a network for hub:NAME, got HF_HUB_OFFLINE=1; unset it, or name a folder")
    if get_token() is None:
        raise ConfigError("to: expected a token for hub:NAME, got none; set HF_TOKEN, or run hf auth login")
    reason = unreachable(constants.ENDPOINT)
    if reason:
        raise ConfigError(f"to: expected an answer of {constants.ENDPOINT}, got {reason}; name a folder instead")


def upload(folder: Path, name: str, private: bool) -> str:
    """Create the model on the hub if it does not exist, and upload all files of a folder in one commit.

    Args:
        folder: The files.
        name: The model's id.
        private: Whether a new model is private.

    Returns:
        The model's address.

    Raises:
        DataError: The hub refuses the upload.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Model, runs and card")
    except Exception as error:  # an error of the hub, httpx or httpx2, depending on the version of huggingface_hub
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"hub:{name}: expected the hub to take the files, got {reason}") from error
    return str(address)
