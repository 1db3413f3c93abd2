"""safetensors artifacts: round trips, writes that fail, and damage of every kind."""

import pickle

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from esm_turbo.files import artifacts
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact

KIND, VERSION = "calibration", 3
TENSORS = {
    "uint8": torch.arange(24, dtype=torch.uint8).view(2, 3, 4),
    "int32": torch.tensor([-1, 2**31 - 1], dtype=torch.int32),
    "bfloat16": torch.tensor([[1.5, -0.0, float("nan")]], dtype=torch.bfloat16),
    "float32": torch.randn(5, generator=torch.Generator().manual_seed(0)),
    "bool": torch.tensor([True, False]),
    "empty": torch.zeros(0, 7),
    "scalar": torch.tensor(4, dtype=torch.int64),
}
METADATA = {"geometry": {"num_layers": 2}, "note": 'mu = "µ"\n', "none": None, "numbers": [1, 2.5], "counts": {}}


def written(path, tensors=TENSORS, metadata=METADATA, kind=KIND, version=VERSION):
    write_artifact(path, kind, version, tensors, metadata)
    return path


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "x.safetensors")


def refused(path, match=None):
    with pytest.raises(ArtifactError, match=match) as caught:
        read_artifact(path, KIND, VERSION)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


BASE = torch.arange(12.0).view(3, 4)
VIEWS = {"transposed": BASE.T, "column": BASE[:, 1], "rows": BASE[1:], "grad": BASE.clone().requires_grad_()}


@pytest.mark.parametrize("stored", [TENSORS, VIEWS], ids=["tensors", "views"])
def test_round_trip(tmp_path, stored):
    tensors, metadata = read_artifact(written(tmp_path / "x", stored), KIND, VERSION)
    assert metadata == METADATA
    assert tensors.keys() == stored.keys()
    for name, tensor in stored.items():
        tensor = tensor.detach().contiguous()
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert tensors[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.gpu
def test_views_of_a_device_are_written_as_those_of_the_host(tmp_path):
    base, other = torch.arange(12.0, device="cuda"), torch.arange(100, device="cuda")
    tensors = {
        "half": base[6:].view(2, 3).T,
        "rest": base[:6].requires_grad_(),
        "little": other[3:5],
        "of it": other[9:10],
        "empty": base[:0],
    }
    with torch.inference_mode():
        tensors["inference"] = torch.ones(3, device="cuda")
    found, _ = read_artifact(written(tmp_path / "device", tensors), KIND, VERSION)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.detach().cpu())


def test_equal_content_has_equal_bytes(tmp_path):
    """Whatever the order in which it is given; other content has another checksum."""
    metadata = METADATA | {"quoted": 'a "b" é \n', **{f"field {index}": index for index in range(9)}}
    paths = [written(tmp_path / str(number), metadata=metadata) for number in range(8)]
    paths.append(written(tmp_path / "y", dict(reversed(TENSORS.items())), dict(reversed(metadata.items()))))
    assert len({path.read_bytes() for path in paths}) == 1
    assert read_artifact(paths[0], KIND, VERSION)[1] == metadata
    other = written(tmp_path / "z", TENSORS, metadata | {"none": 0})
    checksums = set()
    for path in (*paths, other):
        with artifacts.safe_open(path, framework="pt") as opened:
            checksums.add(opened.metadata()["sha256"])
    assert len(checksums) == 2


def test_tensors_do_not_change_with_their_file(file):
    """Overwritten in place, as by `cp`."""
    (own, _), (mapped, _) = read_artifact(file, KIND, VERSION), read_artifact(file, KIND, VERSION, mapped=True)
    assert torch.equal(mapped["uint8"], own["uint8"])
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert torch.equal(own["uint8"], TENSORS["uint8"]) and not torch.equal(mapped["uint8"], TENSORS["uint8"])


# --- damage


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path, file, where, bit):
    content = bytearray(file.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    altered = tmp_path / "altered"
    altered.write_bytes(content)
    refused(altered)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
@example(share=0.0)
@example(share=0.9999)
def test_any_truncation_is_found(tmp_path, file, share):
    content = file.read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(content[: int(share * len(content))])
    refused(cut, "damaged or not a safetensors file")


def test_appended_bytes_are_found(file):
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    refused(file)


@pytest.mark.parametrize("what", ["value", "dtype", "name", "missing", "extra", "metadata", "more metadata"])
def test_altered_content_is_found(tmp_path, file, what):
    """Valid safetensors files whose content is not what was written."""
    tensors = dict(TENSORS)
    with artifacts.safe_open(file, framework="pt") as opened:
        strings = opened.metadata()
    if what == "value":
        tensors["float32"] = tensors["float32"] + 1e-6
    elif what == "dtype":
        tensors["int32"] = tensors["int32"].view(torch.uint32)
    elif what == "name":
        tensors["renamed"] = tensors.pop("float32")
    elif what == "missing":
        del tensors["empty"]
    elif what == "extra":
        tensors["extra"] = torch.zeros(1)
    elif what == "metadata":
        strings["numbers"] = "[1, 2.6]"
    else:
        strings["another"] = "1"
    save_file(tensors, tmp_path / "altered", metadata=strings)
    refused(tmp_path / "altered", "does not match its checksum.*altered")


@pytest.mark.parametrize("version", [0, 2, 4, "4.0"])
def test_other_format_versions_are_refused_with_the_remedy(tmp_path, version):
    message = refused(written(tmp_path / "x", version=version), f"format version {version}, this release reads 3")
    assert "install the release that wrote it" in message


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"kind": "cache"}])
def test_other_safetensors_files_are_refused(tmp_path, metadata):
    save_file({"weight": torch.zeros(2)}, tmp_path / "x", metadata=metadata)
    refused(tmp_path / "x", f"not an esm_turbo calibration.*{(metadata or {}).get('kind')!r}")


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, b"not a tensor file at all", pickle.dumps({"a": 1})])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    refused(tmp_path / "x", "damaged or not a safetensors file")


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory")])
def test_too_little_memory_is_no_damage(file, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(artifacts, "_digest", fail)
    with pytest.raises(type(error)) as caught:
        read_artifact(file, KIND, VERSION)
    assert caught.value is error


def test_pickles_are_never_loaded(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "damaged or not a safetensors file")


def test_missing_files_and_folders_are_refused(tmp_path):
    refused(tmp_path / "nowhere", "no such calibration file")
    refused(tmp_path, "no such calibration file")


# --- writing


def test_an_existing_file_is_replaced_and_an_open_reader_keeps_it(file):
    before = file.stat().st_ino
    with artifacts.safe_open(file, framework="pt") as opened:
        written(file, {"only": torch.ones(1)}, {})
        assert torch.equal(opened.get_tensor("uint8"), TENSORS["uint8"])
    assert read_artifact(file, KIND, VERSION)[0].keys() == {"only"}
    assert file.stat().st_ino != before
    assert list(file.parent.iterdir()) == [file]


class Killed(BaseException):
    """Not an Exception, as KeyboardInterrupt and SystemExit are not."""


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), Killed()])
@pytest.mark.parametrize("existing", [True, False])
def test_interrupted_write_leaves_the_old_file_or_none(tmp_path, monkeypatch, error, existing):
    path = tmp_path / "x.safetensors"
    if existing:
        written(path)
    before = path.read_bytes() if existing else None

    def interrupted(tensors, filename, metadata):
        with open(filename, "wb") as half:
            half.write(b"half")
        raise error

    monkeypatch.setattr(artifacts, "save_file", interrupted)
    with pytest.raises(type(error)):
        written(path, {"new": torch.ones(3)})
    assert [p.name for p in tmp_path.iterdir()] == (["x.safetensors"] if existing else [])
    if existing:
        assert path.read_bytes() == before


def test_metadata_that_is_not_json_writes_nothing(tmp_path):
    with pytest.raises(TypeError):
        written(tmp_path / "x", metadata={"tensor": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []
