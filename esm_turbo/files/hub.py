"""Find a model: in a folder, in the local cache of the hub, or on the hub."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

_SHORT = re.compile(r"esm2_t\d+_\d+[MB]_UR50D", re.ASCII)
# Seconds within which the hub must answer; downloads have no limit.
_TIMEOUT = 10.0


def model_name(name_or_path: str) -> str:
    """A hub id as it is; the base name of a folder, so that artifacts do not record local paths."""
    return os.path.basename(os.path.abspath(name_or_path)) if os.path.isdir(name_or_path) else name_or_path


def full_name(name_or_path: str) -> str:
    """The hub id of a checkpoint of Meta's given as `esm2_t6_8M_UR50D`; another name, or a folder's, as it is."""
    short = _SHORT.fullmatch(name_or_path) and not os.path.exists(name_or_path)
    return f"facebook/{name_or_path}" if short else name_or_path


class ModelNotFoundError(OSError, ValueError):
    """A model is neither a local folder nor available from the hub."""


def local_files_only(source: str) -> bool:
    """True if a model must be loaded from the local cache because the hub cannot be reached.

    Called once before loading, because without a network the hub's client retries six times, for over twenty seconds.

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
            f"{source}: there is no such folder, and it is not a valid hub id; check the path"
        ) from None
    except RepositoryNotFoundError:
        reason = "the Hugging Face hub has no such model, or does not show it to you"
    except HfHubHTTPError:
        # The hub or a mirror answered: if anything is wrong, loading reports it.
        return False
    except OfflineModeIsEnabled:
        reason = "there is no local copy and HF_HUB_OFFLINE forbids the Hugging Face hub"
    # The exceptions of the HTTP client come from different packages in different versions of the hub's client.
    except Exception:
        reason = "the Hugging Face hub cannot be reached"
    else:
        return False
    if copied:
        return True
    raise not_found(source, reason)


@contextlib.contextmanager
def without_loading_bar() -> Iterator[None]:
    """Hide the progress bar that transformers draws for the weights in memory; downloads keep theirs."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    downloads = not are_progress_bars_disabled()
    # Both of transformers' switches act on downloads as well.
    logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        logging.enable_progress_bar()
        if not downloads:
            disable_progress_bars()


def not_found(source: str, reason: str | None = None) -> ModelNotFoundError:
    """A one-line error that tells why a model cannot be loaded."""
    if os.path.isdir(source):
        return ModelNotFoundError(
            f"{source}: the folder is not a complete checkpoint (config.json, weights, vocab.txt)"
        )
    reason = reason or "the Hugging Face hub cannot be reached or has no such checkpoint of ESM-2, ESM-C or E1"
    # A name that is a file was meant as a folder.
    what = "folder" if os.path.exists(source) else "file or folder"
    return ModelNotFoundError(
        f"cannot load {source!r}: there is no such {what}, and {reason};"
        " check the name and the network, or give a local folder"
    )
