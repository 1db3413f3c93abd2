"""The calibration artifact: what is saved is what is loaded, it belongs to one model, and damage is refused."""

import copy
import dataclasses
import shutil
import warnings

import numpy as np
import pytest
import torch
from transformers import EsmModel

from esm_turbo import Calibration, KVCalibrator, TurboConfig, TurboEsmForMaskedLM, TurboEsmModel
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.calibration import FORMAT_VERSION, READABLE_VERSIONS, OtherWeightsWarning
from esm_turbo.config import PRODUCT_PRESETS, Geometry
from esm_turbo.files.artifacts import ArtifactError, read_artifact, write_artifact
from esm_turbo.files.kinds import CALIBRATION_FILE
from esm_turbo.files.quality import Figures, InaccuratePresetWarning, Quality

GOOD = Figures(cosine_mean=1.0, cosine_q01=1.0, kl_mean=0.0, kl_q99=0.0, top1_agreement=1.0)
SIZES = {"head_dim": 16, "heads": 2, "layers": 2}
PROVENANCE = {"fasta": {"name": "µ.fasta", "sha256": "0" * 64}, "model": "tiny-esm2"}
OPTIONS = {
    "protected": TurboConfig(protect_special_tokens=True),
    "five bits": TurboConfig(bits=5),
    "both": TurboConfig(bits=2, protect_special_tokens=True),
}


@pytest.fixture(scope="module")
def model(tiny_esm):
    return tiny_esm(**SIZES)


@pytest.fixture(scope="module")
def calibration(model, random_proteins):
    calibrator = KVCalibrator(model, sample_size=200)
    calibrator.partial_fit(*random_proteins([40, 90, 65, 120], seed=1, eos=True))
    return calibrator.finalize(provenance=PROVENANCE)


@pytest.fixture
def file(calibration, tmp_path):
    path = tmp_path / "calib.safetensors"
    calibration.save(path)
    return path


def refused(path, match, **options):
    """Loading raises one line that names the file and says what to do."""
    with pytest.raises(ArtifactError, match=match) as caught:
        Calibration.load(path, **options)
    message = str(caught.value)
    assert str(path) in message
    assert "esm-turbo calibrate" in message
    assert "\n" not in message


def rewritten(path, change, version=FORMAT_VERSION):
    """The file with tensors and metadata changed by `change`, and a checksum that fits."""
    tensors, metadata = read_artifact(path, "calibration", FORMAT_VERSION)
    change(tensors, metadata)
    write_artifact(path, "calibration", version, tensors, metadata)
    return path


def assert_same_states(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def assert_same_statistics(one, other):
    assert one.geometry == other.geometry
    for kind in ("residues", "specials"):
        for state in ("keys", "values"):
            a, b = getattr(getattr(one, kind), state), getattr(getattr(other, kind), state)
            assert a.count == b.count
            np.testing.assert_array_equal(a.mean, b.mean)
            np.testing.assert_array_equal(a.covariance, b.covariance)
    for field in dataclasses.fields(one.sample):
        a, b = getattr(one.sample, field.name), getattr(other.sample, field.name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert one.sensitivity.count == other.sensitivity.count
    for name in ("key_mean", "queries", "attention"):
        np.testing.assert_array_equal(getattr(one.sensitivity, name), getattr(other.sensitivity, name))
    for name in ("keys", "values"):
        for part in ("count", "mean", "covariance"):
            a, b = (getattr(getattr(s.sensitivity, name), part) for s in (one, other))
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.inv_freq, other.inv_freq)
    np.testing.assert_array_equal(one.output_gram, other.output_gram)


def test_saved_calibrations_load_bit_for_bit(calibration, file, model):
    loaded = Calibration.load(file, model=model)
    assert_same_statistics(loaded.statistics, calibration.statistics)
    np.testing.assert_array_equal(loaded.fingerprint, calibration.fingerprint)
    assert loaded.provenance == calibration.provenance
    assert loaded.provenance["fasta"] == PROVENANCE["fasta"]
    assert loaded.geometry == Geometry(2, 2, 16)
    assert loaded.nbytes == calibration.nbytes > 0
    for preset in PRODUCT_PRESETS:
        assert_same_states(loaded.codec(preset).state, calibration.codec(preset).state)


def test_loaded_presets_need_no_fitting(calibration, file, monkeypatch):
    loaded = Calibration.load(file)
    for codec in {type(loaded.codec(preset)) for preset in PRODUCT_PRESETS}:
        monkeypatch.setattr(codec, "fit", lambda *_: pytest.fail("fitted again"))
    for preset in PRODUCT_PRESETS:
        assert loaded.codec(preset).config == PRODUCT_PRESETS[preset]
        assert loaded.codec(preset) is loaded.codec(PRODUCT_PRESETS[preset])


@pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
def test_codecs_fitted_later_are_the_same_from_memory_and_from_the_file(calibration, file, config):
    from_memory = Calibration(calibration.statistics, calibration.fingerprint, {}).codec(config)
    from_file = Calibration.load(file).codec(config)
    assert_same_states(from_memory.state, from_file.state)
    assert from_file.config == config


@pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
def test_codecs_fitted_before_saving_are_saved(calibration, tmp_path, config, monkeypatch):
    mine = Calibration(calibration.statistics, calibration.fingerprint, {})
    expected = mine.codec(config)
    mine.save(tmp_path / "x")
    loaded = Calibration.load(tmp_path / "x")
    monkeypatch.setattr(type(expected), "fit", lambda *_: pytest.fail("fitted again"))
    assert_same_states(loaded.codec(config).state, expected.state)


def test_a_fit_for_which_a_device_lacks_memory_runs_on_the_cpu(calibration, monkeypatch):
    mine = Calibration(calibration.statistics, calibration.fingerprint, {})
    cls = type(mine.codec("turbo3"))
    expected, whole, devices = mine.codec("turbo2"), cls.fit_all, []

    def without_memory(configs, statistics):
        devices.append(statistics.device)
        if statistics.device == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(configs, statistics)

    monkeypatch.setattr(cls, "fit_all", without_memory)
    again = Calibration(calibration.statistics, calibration.fingerprint, {})
    again.fit(["turbo2"], device=torch.device("cuda"))
    assert devices == ["cuda", "cpu"]
    assert_same_states(again.codec("turbo2").state, expected.state)


def test_saving_what_was_loaded_changes_nothing(file, tmp_path):
    Calibration.load(file).save(tmp_path / "again")
    first, second = (read_artifact(path, "calibration", FORMAT_VERSION) for path in (file, tmp_path / "again"))
    assert first[1] == second[1]
    assert_same_states(first[0], second[0])


def of_format_1(tensors, metadata):
    """Whole matrices and inverses, as the first format has them."""
    size = metadata["geometry"]["head_dim"]
    rows, columns = np.tril_indices(size)
    for name, half in tensors.items():
        if name.split(".")[-1] in ("covariance", "queries", "output_gram"):
            tensors[name] = torch.empty(*half.shape[:-1], size, size)
            tensors[name][..., rows, columns] = tensors[name][..., columns, rows] = half
    for name, (kind, source) in metadata.pop("inverses").items():
        inverse = {"transposed": torch.transpose, "inverted": lambda x, *_: torch.linalg.inv(x.double()).float()}
        tensors[name] = inverse[kind](tensors[source], -1, -2).contiguous()


def test_files_of_format_1_load(calibration, file):
    loaded = Calibration.load(rewritten(file, of_format_1, version=1))
    assert_same_statistics(loaded.statistics, calibration.statistics)
    for preset in PRODUCT_PRESETS:
        for name, tensor in calibration.codec(preset).state.items():
            # The inverses are another library's here.
            torch.testing.assert_close(loaded.codec(preset).state[name], tensor, rtol=1e-6, atol=1e-6)


def test_files_hold_triangles_and_no_inverses(file):
    tensors, metadata = read_artifact(file, "calibration", FORMAT_VERSION)
    assert tensors["output_gram"].shape == (2, 2, 136)
    assert not [name for name in tensors if name.endswith("_inverse")]
    assert {kind for kind, _ in metadata["inverses"].values()} == {"transposed", "inverted"}


def test_files_of_the_presets_hold_a_part_of_the_sample(tiny_esm, random_proteins, tmp_path):
    calibrator = KVCalibrator(tiny_esm(**SIZES)).partial_fit(*random_proteins([300, 200], seed=1, eos=True))
    calibration = calibrator.finalize(presets=())
    whole = calibration.statistics
    calibration.save(tmp_path / "unfitted")
    assert_same_statistics(Calibration.load(tmp_path / "unfitted").statistics, whole)
    calibration.fit().save(tmp_path / "fitted")
    loaded = Calibration.load(tmp_path / "fitted")
    assert_same_statistics(loaded.statistics, dataclasses.replace(whole, sample=whole.sample.at(slice(256))))
    # The sample of a smaller `sample_size`.
    few = KVCalibrator(calibrator.model, sample_size=256).partial_fit(*random_proteins([300, 200], seed=1, eos=True))
    np.testing.assert_array_equal(few.finalize(presets=()).statistics.sample.keys, loaded.statistics.sample.keys)


def test_a_file_of_650m_has_120_mib_at_most(tiny_esm, random_proteins, tmp_path):
    calibrator = KVCalibrator(tiny_esm(head_dim=64, heads=8, layers=1))
    calibrator.partial_fit(*random_proteins([600, 600], seed=1, eos=True)).finalize().save(tmp_path / "heads")
    size = (tmp_path / "heads").stat().st_size
    # 33 layers of 20 heads.
    assert size * 33 * 20 / 8 <= 120 * 2**20


def test_a_folder_stands_for_the_file_in_it(calibration, tmp_path):
    calibration.save(tmp_path / "new" / CALIBRATION_FILE)
    assert_same_statistics(Calibration.load(tmp_path / "new").statistics, calibration.statistics)
    assert_same_statistics(Calibration.load(str(tmp_path / "new")).statistics, calibration.statistics)


def test_states_of_renamed_presets_still_load(calibration, file):
    def rename(tensors, metadata):
        metadata["presets"] = {"of old": metadata["presets"].pop("paper")}
        for name in [name for name in tensors if name.startswith("codec.paper.")]:
            tensors[name.replace("codec.paper.", "codec.of old.")] = tensors.pop(name)
        kind, source = metadata["inverses"].pop("codec.paper.key_inverse")
        metadata["inverses"]["codec.of old.key_inverse"] = kind, source.replace("codec.paper.", "codec.of old.")

    loaded = Calibration.load(rewritten(file, rename))
    assert_same_states(loaded.codec("paper").state, calibration.codec("paper").state)


def test_codec_refuses_unknown_presets(calibration):
    with pytest.raises(ValueError, match="`preset` must be one of"):
        calibration.codec("turbo99")
    with pytest.raises(ValueError, match="`codec` must be one of"):
        calibration.codec(TurboConfig(codec="gzip"))


def other_classes(model):
    body = EsmModel(model.config, add_pooling_layer=False)
    body.load_state_dict(model.esm.state_dict())
    return {
        "EsmForMaskedLM": model,
        "EsmModel": body,
        "TurboEsmForMaskedLM": TurboEsmForMaskedLM.from_esm(model),
        "TurboEsmModel": TurboEsmModel.from_esm(model.esm),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["EsmForMaskedLM", "EsmModel", "TurboEsmForMaskedLM", "TurboEsmModel"])
def test_serves_its_model_in_any_class_and_dtype(calibration, file, model, name, dtype):
    mine = copy.deepcopy(other_classes(model)[name]).to(dtype)
    calibration.check_model(mine)
    assert Calibration.load(file, model=mine).geometry == calibration.geometry


def test_calibration_of_a_cast_serves_the_original(tiny_esm, model, random_proteins):
    cast = KVCalibrator(tiny_esm(**SIZES).bfloat16()).partial_fit(*random_proteins([60])).finalize(presets=())
    cast.check_model(model)


@pytest.mark.parametrize(
    "sizes",
    [{"layers": 3}, {"heads": 4}, {"head_dim": 24}, {"heads": 1, "head_dim": 32}],
    ids=lambda sizes: ", ".join(sizes),
)
def test_other_geometries_are_refused(calibration, file, tiny_esm, sizes):
    sizes = SIZES | sizes
    other = tiny_esm(**sizes)
    geometry = f"{sizes['layers']} layers x {sizes['heads']} heads x {sizes['head_dim']}"
    match = f"for 2 layers x 2 heads x 16, the model has {geometry}.*esm-turbo calibrate"
    with pytest.raises(ValueError, match=match):
        calibration.check_model(other)
    with pytest.raises(ValueError, match=match):
        Calibration.load(file, model=other)


def test_other_weights_are_refused(calibration, file, tiny_esm):
    other = tiny_esm(**SIZES, seed=1)
    match = "made for tiny-esm2: the weights are not this model's.*esm-turbo calibrate"
    with pytest.raises(ValueError, match=match):
        calibration.check_model(other)
    with pytest.raises(ValueError, match=match):
        Calibration.load(file, model=other)
    with pytest.raises(ValueError, match=match):
        TurboEsmForMaskedLM.from_esm(other, calibration=file)


def test_shipped_calibration_is_the_embedded_models(turbo):
    shipped = Calibration.load(EMBEDDED_MODEL, model=turbo.model)
    assert shipped.provenance["max_positions"] >= 1022
    assert shipped.provenance["residues"] >= 20_000
    _, metadata = read_artifact(EMBEDDED_MODEL / CALIBRATION_FILE, "calibration", *READABLE_VERSIONS)
    options = [TurboConfig.from_dict(options) for options in metadata["presets"].values()]
    assert set(PRODUCT_PRESETS.values()) <= set(options)


def test_missing_files(tmp_path):
    refused(tmp_path / "nowhere.safetensors", "no such calibration file")
    with pytest.raises(ArtifactError, match=r"calibration\.safetensors: no such calibration file"):
        Calibration.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: rewritten(path, lambda *_: None, FORMAT_VERSION + 1), f"format version {FORMAT_VERSION + 1}"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "damaged or not a safetensors file"),
        (lambda path: shutil.copy(EMBEDDED_MODEL / "model.safetensors", path), "not an esm_turbo calibration"),
        (lambda path: torch.save({}, path), "damaged or not a safetensors file"),
    ],
    ids=["another version", "truncated", "a model", "a pickle"],
)
def test_files_that_are_no_calibration(file, change, message):
    change(file)
    refused(file, message)


def without(name):
    """Removes a tensor, or an entry of the metadata."""
    return lambda tensors, metadata: (tensors if name in tensors else metadata).pop(name)


def with_entry(*path, **entries):
    """Changes entries of the metadata, below `path`."""

    def change(tensors, metadata):
        for name in path:
            metadata = metadata[name]
        metadata.update(entries)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (without(name), f"missing or wrong.*{name.split('.')[-1]}")
            for name in (
                "fingerprint",
                "output_gram",
                "moments.specials.values.covariance",
                "sample.key_weights",
                "sensitivity.keys.count",
                "inv_freq",
                "codec.turbo3.key_widths",
                "codec.paper.value_step",
                "geometry",
                "counts",
                "presets",
                "provenance",
            )
        ),
        # Sizes of caches would be computed of it, in memory that the file does not stand for.
        (with_entry("geometry", num_layers=10**8), "are not of 100000000 layers"),
        (with_entry("geometry", groups=2), "missing or wrong.*groups"),
        (with_entry("presets", "paper", entropy_coding=True), "entropy_coding.*newer version"),
        (with_entry("presets", "paper", codec="gzip"), "`codec` must be one of.*gzip"),
        (with_entry("presets", "paper", bits=12), "`bits` must be one of.*12"),
        *((with_entry(presets=presets), "missing or wrong") for presets in ([], "paper", {"paper": None})),
    ],
)
def test_entries_that_are_missing_or_wrong_are_named(file, change, message):
    refused(rewritten(file, change), message)


BAD = Figures(cosine_mean=0.7, cosine_q01=0.2, kl_mean=0.5, kl_q99=3.0, top1_agreement=0.5)


@pytest.fixture
def measured(calibration):
    """The calibration, measured to be bad at `turbo3`."""
    measured = copy.copy(calibration)
    measured.quality = Quality(3, 500, "0" * 64, "float32", "cpu", {"turbo3": BAD, "turbo1": GOOD}, 8, {0: GOOD})
    measured._warned = set()
    return measured


def test_measured_accuracy_is_saved(measured, calibration, file, tmp_path):
    assert Calibration.load(file).quality is None
    path = tmp_path / "measured.safetensors"
    measured.save(path)
    loaded = Calibration.load(path)
    assert loaded.quality == measured.quality
    assert_same_statistics(loaded.statistics, calibration.statistics)


@pytest.mark.parametrize("change", [{"presets": []}, {"newer": 1}, {"freezing": {"few": {}}}])
def test_accuracy_of_another_shape(measured, tmp_path, change):
    path = tmp_path / "measured.safetensors"
    measured.save(path)
    refused(rewritten(path, lambda _, metadata: metadata["quality"].update(change)), "missing or wrong")


def test_a_preset_that_falls_short_is_warned_of_once(measured, calibration, model, recwarn):
    turbo = TurboEsmForMaskedLM.from_esm(model, calibration=calibration, preset="turbo3")
    turbo.set_turbo(calibration=measured, preset="turbo1")
    assert not [one for one in recwarn if one.category is InaccuratePresetWarning]
    for _ in range(2):
        turbo.set_turbo(calibration=measured, preset="turbo3")
    [one] = [one for one in recwarn if one.category is InaccuratePresetWarning]
    assert "preset 'turbo3' is inaccurate on this model: mean cosine 0.70000 and KL 0.5 nats" in str(one.message)


def test_provenance_is_a_copy(calibration):
    given = {"model": "a"}
    mine = Calibration(calibration.statistics, calibration.fingerprint, given)
    given["model"] = "b"
    assert mine.provenance == {"model": "a"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_only_agree_are_mentioned(model, calibration, tmp_path, dtype):
    """A fine-tuned model may be as near as a rounding to float16: its calibration is another one, and is not silent."""
    calibration.save(tmp_path / "calibration.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Calibration.load(tmp_path / "calibration.safetensors", model=model)
        Calibration.load(tmp_path / "calibration.safetensors", model=copy.deepcopy(model).bfloat16())
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        weight = tuned.esm.encoder.layer[0].intermediate.dense.weight
        weight.add_(weight.abs().mean() * weight.sign(), alpha=5e-3)
    with pytest.warns(OtherWeightsWarning, match=r"of tiny-esm2 that agree with the model's to 0\.02"):
        Calibration.load(tmp_path / "calibration.safetensors", model=tuned.to(dtype))


def test_a_calibration_that_tells_attention_alone_says_so(model, calibration, tmp_path):
    """As those of earlier versions do."""
    earlier = copy.copy(calibration)
    earlier.weights = None
    earlier.save(tmp_path / "calibration.safetensors")
    with pytest.warns(OtherWeightsWarning, match="tells the model's attention alone"):
        Calibration.load(tmp_path / "calibration.safetensors", model=model)
