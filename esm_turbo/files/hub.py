"""Where a model comes from: a folder, the local copy of a hub model, or the hub."""

from __future__ import annotations

import os

# Seconds for the hub to answer at all; a download takes as long as it takes.
_TIMEOUT = 10.0


def model_name(name_or_path: str) -> str:
    """A hub id unchanged; for a folder its base name, so that artifacts do not record local paths."""
    return os.path.basename(os.path.abspath(name_or_path)) if os.path.isdir(name_or_path) else name_or_path


class ModelNotFoundError(OSError, ValueError):
    """There is no such model here, and the hub does not give it."""


def local_files_only(source: str) -> bool:
    """Whether a model must be taken from the local copy because the hub cannot be reached.

    Asked once before loading, because the hub's client tries six times, and longer than twenty seconds, to reach a
    network that is not there.

    Args:
        source: a folder or a hub id.

    Raises:
        ModelNotFoundError: the hub has no such model, or cannot be reached and there is no local copy.
    """
    if os.path.isdir(source):
        return False
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        copied = isinstance(try_to_load_from_cache(source, "config.json"), str)
        model_info(source, timeout=_TIMEOUT)
    except HFValidationError:
        raise ModelNotFoundError(
            f"{source}: there is no such folder, and it is no name of a hub model; check the path"
        ) from None
    except RepositoryNotFoundError:
        if copied:
            return True
        raise not_found(source, "the Hugging Face hub has no such model, or does not show it to you") from None
    except HfHubHTTPError:
        # The hub or a mirror answered: loading will say what is wrong, if anything is.
        return False
    except OfflineModeIsEnabled:
        if copied:
            return True
        raise not_found(source, "there is no local copy and HF_HUB_OFFLINE forbids the Hugging Face hub") from None
    # The exceptions of the HTTP client have changed their package between versions of the hub's client.
    except Exception:
        if copied:
            return True
        raise not_found(source, "the Hugging Face hub cannot be reached") from None
    return False


def not_found(source: str, reason: str | None = None) -> ModelNotFoundError:
    """The error that says why a model cannot be loaded, in one line."""
    if os.path.isdir(source):
        return ModelNotFoundError(f"{source}: the folder is no complete checkpoint (config.json, weights, vocab.txt)")
    reason = reason or "the Hugging Face hub cannot be reached or has no such ESM-2 checkpoint"
    return ModelNotFoundError(
        f"cannot load {source!r}: there is no such folder, and {reason};"
        " check the name and the network, or give a local folder"
    )
