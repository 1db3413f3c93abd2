"""Where a model is found, with every answer of the hub."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from esm_turbo.files.hub import ModelNotFoundError, full_name, local_files_only

MODEL = "facebook/esm2_t6_8M_UR50D"


class NetworkDown(Exception):
    """An exception of the HTTP client."""


def http_error(cls):
    error = cls.__new__(cls)
    Exception.__init__(error, "refused")
    return error


@pytest.fixture
def hub(monkeypatch):
    """`hub(answer, copied)` sets the answer of the hub, an error or None, and whether there is a local copy."""

    def set_up(answer, copied):
        def model_info(name, timeout):
            assert timeout <= 10
            if answer is not None:
                raise answer
            return SimpleNamespace(id=name)

        monkeypatch.setattr(huggingface_hub, "model_info", model_info)
        monkeypatch.setattr(
            huggingface_hub, "try_to_load_from_cache", lambda name, file: "/a/config.json" if copied else None
        )

    return set_up


def test_a_folder_needs_no_hub(hub, tmp_path):
    hub(AssertionError("asked"), False)
    assert local_files_only(str(tmp_path)) is False


@pytest.mark.parametrize("copied", [True, False])
def test_a_reachable_hub_is_used(hub, copied):
    hub(None, copied)
    assert local_files_only(MODEL) is False


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (NetworkDown("name or service not known"), "the Hugging Face hub cannot be reached"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE forbids"),
        (http_error(RepositoryNotFoundError), "the Hugging Face hub has no such model"),
    ],
    ids=["no network", "offline", "no such model"],
)
def test_an_unreachable_hub_falls_back_to_the_local_cache(hub, answer, message):
    hub(answer, copied=True)
    assert local_files_only(MODEL) is True
    hub(answer, copied=False)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        local_files_only(MODEL)
    assert MODEL in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, ValueError)


def test_other_answers_are_left_to_loading(hub):
    # A mirror may lack this part of the interface.
    hub(http_error(HfHubHTTPError), copied=False)
    assert local_files_only(MODEL) is False


@pytest.mark.parametrize("name", ["a/b/c", "no such folder", "./here", "x" * 200])
def test_invalid_names_are_refused(name):
    with pytest.raises(ModelNotFoundError, match="no such folder, and it is not a valid hub id"):
        local_files_only(name)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("esm2_t6_8M_UR50D", "facebook/esm2_t6_8M_UR50D"),
        ("esm2_t48_15B_UR50D", "facebook/esm2_t48_15B_UR50D"),
        ("facebook/esm2_t6_8M_UR50D", "facebook/esm2_t6_8M_UR50D"),
        ("esm2_t6_8M", "esm2_t6_8M"),
    ],
)
def test_short_names(name: str, full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert full_name(name) == full
    # A folder goes before the hub.
    (tmp_path / name).mkdir(parents=True)
    assert full_name(name) == name
