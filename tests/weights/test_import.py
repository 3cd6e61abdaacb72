"""Published checkpoints in, and out again: against the golden networks of the reference implementation."""

import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from module_pickles import (
    HEADER,
    Persistent,
    marking_source,
    module_state,
    network_pickle,
    published_names,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_pickles import mutate
from typer.testing import CliRunner

import tcm
from tcm.cli import app
from tcm.foundation.errors import TcmError
from tcm.weights.card import Provenance
from tcm.weights.edm_names import parse_arguments
from tcm.weights.exported_origin import ORIGIN_KEY
from tcm.weights.exporting import export_state_dict, reference_arguments
from tcm.weights.importing import import_checkpoint, stated_licence

GOLDEN = Path(__file__).parents[1] / "golden"
HEAD = {"logvar_fourier.freqs": 128, "logvar_fourier.phases": 128, "logvar_linear.weight": (1, 128)}
FILES = {
    "ddpmpp_uncond_16": ("EDMPrecond", ("model", "SongUNet")),
    "edm2_cond_16": ("Precond", ("unet", "UNet")),
}


class Golden:
    """A network of the reference implementation: weights, constructor's arguments, an input and its output."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            self.arguments = {key: json.loads(value) for key, value in file.metadata().items()}
        tensors = load_file(GOLDEN / f"{name}.safetensors")
        self.weights = {key.removeprefix("weights."): t for key, t in tensors.items() if key.startswith("weights.")}
        self.x, self.t, self.denoised = tensors["in.x"], tensors["in.t"], tensors["out.denoised"]
        self.labels = tcm.Labels(tensors["in.labels"].argmax(1)) if "in.labels" in tensors else None

    def pickle(self, marker: Path, name: str, **changes: object) -> bytes:
        outer_class, inner = FILES[name]
        return network_pickle(self.weights, self.arguments | changes, marking_source(marker), outer_class, inner)

    def check(self, model: tcm.Model, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        with torch.no_grad():
            out = model.denoiser(self.x, self.t, self.labels)
        torch.testing.assert_close(out, self.denoised, rtol=rtol, atol=atol)


@pytest.fixture(params=list(FILES))
def name(request):
    return request.param


@pytest.fixture
def golden(name):
    return Golden(name)


def save_pickle(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "network.pkl"
    path.write_bytes(data)
    return path


def edm_pickle(tmp_path: Path, **changes: object) -> Path:
    golden = Golden("ddpmpp_uncond_16")
    return save_pickle(tmp_path, golden.pickle(tmp_path / "marker", "ddpmpp_uncond_16", **changes))


def test_pickle_equals_golden_network(tmp_path, golden, name):
    marker = tmp_path / "marker"
    path = save_pickle(tmp_path, golden.pickle(marker, name))
    imported = import_checkpoint(path)
    assert imported.model.card.kind == "diffusion"
    assert imported.found.licence == "CC BY-NC-SA 4.0: non-commercial use only"
    imported.model.save(tmp_path / "model")
    golden.check(tcm.load(tmp_path / "model"))
    assert not marker.exists()
    with published_names():
        pickle.loads(path.read_bytes())
    assert marker.exists(), "the fixture must be one that the usual loader executes"


def test_arguments_that_change_nothing(tmp_path, golden, name):
    harmless = {"attn_type": "dot", "emb_norm": False, "scale": 1.0, "learnable_scale": False}
    path = save_pickle(tmp_path, golden.pickle(tmp_path / "marker", name, **harmless))
    golden.check(import_checkpoint(path).model)


@pytest.mark.parametrize(
    ("shape", "classes", "options", "second_time"),
    [
        ((3, 64, 64), 1000, {"kind": "consistency"}, 1.526),
        ((3, 64, 64), 1000, {"kind": "truncated", "t_prime": 1.0}, 1.526),
        ((3, 64, 64), 1000, {"kind": "truncated", "t_prime": 2.0}, 2.0),
        ((3, 64, 64), 1000, {"kind": "truncated", "t_prime": 1.0, "second_time": 1.2}, 1.2),
        ((3, 64, 64), 10, {"kind": "consistency"}, 1.0),
        ((3, 32, 32), 0, {"kind": "consistency"}, 1.0),
        ((3, 32, 32), 0, {"kind": "consistency", "second_time": 0.821}, 0.821),
    ],
)
def test_second_time(tmp_path, shape, classes, options, second_time):
    """ImageNet-64 has its own; nothing in a published file says so."""
    network = tcm.EDM2Config(channels=16, channel_mult=(1,), blocks=1, attention=())
    condition = tcm.Classes(classes) if classes else None
    model = tcm.Model.fresh(tcm.ModelCard(kind="consistency", network=network, image_shape=shape, condition=condition))
    export_state_dict(model, tmp_path / "a.safetensors")
    imported = import_checkpoint(tmp_path / "a.safetensors", **options).model
    assert imported.sampler == tcm.ConsistencySampler(second_time=second_time)
    assert imported.sampler.times(imported.denoiser, 2) == [80.0, second_time]


def test_augmentation_layer_is_named_and_left_out(tmp_path):
    golden = Golden("ddpmpp_uncond_16")
    golden.weights["model.map_augment.weight"] = torch.randn(32, 9)
    imported = import_checkpoint(
        save_pickle(tmp_path, golden.pickle(tmp_path / "marker", "ddpmpp_uncond_16", augment_dim=9))
    )
    assert "augmentations" in imported.left_out["model.map_augment.weight"]
    golden.check(imported.model)


def test_float16_and_the_head_of_edm2(tmp_path):
    golden = Golden("edm2_cond_16")
    head = {key: torch.randn(shape) for key, shape in HEAD.items()}
    weights = {key: tensor.half() for key, tensor in (golden.weights | head).items()}
    arguments = golden.arguments | {"logvar_channels": 128, "use_fp16": True}
    data = network_pickle(weights, arguments, marking_source(tmp_path / "m"), "Precond", ("unet", "UNet"))
    imported = import_checkpoint(save_pickle(tmp_path, data))
    assert imported.precisions == "float16"
    assert imported.model.card.uncertainty == 128
    assert {parameter.dtype for parameter in imported.model.denoiser.parameters()} == {torch.float32}
    golden.check(imported.model, rtol=1e-2, atol=1e-2)
    imported.model.save(tmp_path / "model")
    kept = tcm.load(tmp_path / "model").denoiser.uncertainty
    assert torch.equal(kept.weight, head["logvar_linear.weight"].half().float())
    assert torch.equal(kept.freqs, head["logvar_fourier.freqs"].half().float())


@pytest.mark.parametrize("prefix", ["", "model.", "unet.", "module.model.", "_orig_mod.model.", "net.module.model."])
@pytest.mark.parametrize("zipped", [True, False])
def test_state_dicts_with_any_prefix(tmp_path, golden, prefix, zipped):
    path = tmp_path / "weights.pth"
    state = {prefix + key.removeprefix("model."): tensor for key, tensor in golden.weights.items()}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(TcmError, match="--as"):
        import_checkpoint(path)
    imported = import_checkpoint(path, "consistency")
    assert imported.found.prefix == prefix
    assert imported.found.licence == "unknown; ask the publisher"
    golden.check(imported.model)


def test_nested_state_dicts_prefer_the_average(tmp_path, golden):
    path = tmp_path / "fastgen.pt"
    damaged = {key: torch.zeros_like(tensor) for key, tensor in golden.weights.items()}
    optimizer = {"state": {0: {"step": 3, "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4}]}
    torch.save({"model": {"net": damaged, "ema": golden.weights}, "optimizer": optimizer, "iteration": 7}, path)
    imported = import_checkpoint(path, "truncated", 1.0)
    golden.check(imported.model)
    assert imported.model.card.t_min == 1.0
    assert "model.net.model." in imported.found.not_used
    torch.save({"student": golden.weights, "teacher": damaged}, path)
    with pytest.raises(TcmError, match=r"several networks \(student.model., teacher.model.\)"):
        import_checkpoint(path, "consistency")


def test_head_in_a_state_dict_is_kept_and_strangers_are_named(tmp_path):
    golden = Golden("edm2_cond_16")
    head = {key: torch.randn(shape) for key, shape in HEAD.items()}
    state = {f"module.{key}": tensor for key, tensor in (golden.weights | head).items()}
    torch.save(state | {"betas": torch.ones(3)}, tmp_path / "a.pth")
    imported = import_checkpoint(tmp_path / "a.pth", "diffusion")
    assert imported.model.card.uncertainty == 128
    assert imported.found.not_used == {"betas": "outside the network"}


def test_golden_files_themselves(golden, name):
    golden.check(import_checkpoint(GOLDEN / f"{name}.safetensors", "consistency").model)


def test_round_trip_is_bit_identical(tmp_path, golden, name):
    head = {key: torch.randn(shape) for key, shape in HEAD.items()} if name == "edm2_cond_16" else {}
    save_file(golden.weights | head, tmp_path / "a.safetensors")
    first = import_checkpoint(tmp_path / "a.safetensors", "consistency").model
    export_state_dict(first, tmp_path / "b.safetensors")
    again = import_checkpoint(tmp_path / "b.safetensors", "consistency").model
    assert load_file(tmp_path / "b.safetensors").keys() == (golden.weights | head).keys()
    for key, tensor in load_file(tmp_path / "b.safetensors").items():
        assert torch.equal(tensor, (golden.weights | head)[key]), key
    assert again.card.network == first.card.network
    assert again.denoiser.state_dict().keys() == first.denoiser.state_dict().keys()
    for key, tensor in first.denoiser.state_dict().items():
        assert torch.equal(again.denoiser.state_dict()[key], tensor), key


def test_our_own_export_comes_back_without_flags(tmp_path):
    network = tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1)
    provenance = Provenance(recipe="mine", stage="truncated", step=7, licence="CC BY 4.0")
    for sampler in (tcm.ConsistencySampler(second_time=1.3), tcm.HeunSampler()):
        card = tcm.ModelCard(
            kind="truncated" if isinstance(sampler, tcm.ConsistencySampler) else "diffusion",
            sampler=sampler,
            network=network,
            image_shape=(1, 8, 8),
            condition=tcm.Classes(2, ("cat", "dog")),
            sigma_data=0.75,
            t_min=1.0,
            t_max=10.0,
            provenance=provenance,
        )
        model, file = tcm.Model.fresh(card), tmp_path / f"{card.kind}.safetensors"
        export_state_dict(model, file)
        imported = import_checkpoint(file)
        assert imported.found.described.startswith("a model that `tcm export` wrote")
        assert imported.found.licence == "CC BY 4.0"
        again = imported.model.card
        assert again.provenance == provenance.model_copy(update={"imported_from": file.name})
        assert again.model_copy(update={"provenance": provenance}) == card
        assert again.condition.names == ("cat", "dog")
        assert torch.equal(imported.model.sample(3, steps=2), model.sample(3, steps=2))
        with pytest.raises(TcmError, match=r"must be at least 0\.002 and below 80"):
            import_checkpoint(file, "consistency", second_time=100.0)


def test_damaged_words_of_our_own_export(tmp_path):
    file = tmp_path / "a.safetensors"
    card = tcm.ModelCard(
        kind="consistency",
        network=tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1),
        image_shape=(1, 8, 8),
        condition=tcm.Classes(2),
    )
    export_state_dict(tcm.Model.fresh(card), file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    fields = json.loads(metadata[ORIGIN_KEY])
    for change in ("{", json.dumps(fields | {"t_min": -1}), json.dumps(fields | {"more": 1}), json.dumps([])):
        save_file(load_file(file), tmp_path / "b.safetensors", metadata | {ORIGIN_KEY: change})
        with pytest.raises(TcmError, match=r"b\.safetensors: its metadata .* is damaged"):
            import_checkpoint(tmp_path / "b.safetensors")
    for change, problem in (({"t_min": 90.0}, "t_min=90"), ({"class_names": ["one"]}, "names has 1 entries")):
        save_file(load_file(file), tmp_path / "b.safetensors", metadata | {ORIGIN_KEY: json.dumps(fields | change)})
        with pytest.raises(TcmError, match=problem):
            import_checkpoint(tmp_path / "b.safetensors")


def test_our_own_weights_need_no_import(tmp_path):
    card = tcm.ModelCard(
        kind="consistency",
        network=tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1),
        image_shape=(1, 8, 8),
        uncertainty=8,
    )
    tcm.Model.fresh(card).save(tmp_path / "model")
    with pytest.raises(TcmError, match=r"weights of a model folder of this project.* use its folder .*/model "):
        import_checkpoint(tmp_path / "model" / "model.safetensors")


@pytest.mark.parametrize(
    "network",
    [
        tcm.DDPMppConfig(channels=8, channel_mult=(1, 2), blocks=2, attention=(4,), dropout=0.1, noise_mult=2),
        tcm.DDPMppConfig(channels=8, channel_mult=(2,), blocks=1, attention=()),
        tcm.EDM2Config(channels=64, channel_mult=(1, 2), blocks=1, attention=(8, 4), dropout=0.4, dropout_up_to=8),
    ],
)
def test_exported_shapes_tell_the_network(tmp_path, network):
    card = tcm.ModelCard(kind="consistency", network=network, image_shape=(1, 8, 8), condition=tcm.Classes(3))
    model = tcm.Model.fresh(card)
    assert parse_arguments(reference_arguments(card)) == (network, (1, 8, 8), tcm.Classes(3))
    export_state_dict(model, tmp_path / "a.safetensors")
    torch.save(load_file(tmp_path / "a.safetensors"), tmp_path / "a.pth")
    imported = import_checkpoint(tmp_path / "a.pth", "consistency").model
    x, t, labels = torch.randn(2, 1, 8, 8), torch.tensor([0.5, 3.0]), tcm.Labels(torch.tensor([0, 2]))
    with torch.no_grad():
        assert torch.equal(imported.denoiser(x, t, labels), model.denoiser(x, t, labels))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encoder_type": "residual"}, "NCSN"),
        ({"embedding_type": "fourier"}, "NCSN"),
        ({"resample_filter": [1, 3, 3, 1]}, "NCSN"),
        ({"skip_scale": 0.5}, "skip_scale"),
        ({"channel_mult_emb": 8}, "channel_mult_emb"),
        ({"attn_type": "cosine"}, "attn_type is not 'dot'"),
        ({"attn_type": None}, "attn_type is not 'dot'"),
        ({"emb_norm": True}, "emb_norm is not False"),
        ({"emb_norm": 0}, "emb_norm is not False"),
        ({"scale": 0.5}, "scale is not 1.0"),
        ({"scale": [1.0]}, "scale is not 1.0"),
        ({"scale": True}, "scale is not 1.0"),
        ({"learnable_scale": True}, "learnable_scale is not False"),
        ({"model_channels": 2**40}, "model_channels"),
        ({"model_channels": 4096}, "far more weights"),
        ({"model_channels": "32"}, "model_channels"),
        ({"model_channels": 33}, "network"),
        ({"model_channels": True}, "model_channels"),
        ({"num_blocks": 10**9}, "num_blocks"),
        ({"channel_mult": [1] * 10**4}, "channel_mult"),
        ({"channel_mult": []}, "channel_mult"),
        ({"channel_mult": None}, "channel_mult"),
        ({"channel_mult": [1, 2, 4]}, "lacks"),
        ({"img_resolution": -16}, "img_resolution"),
        ({"img_resolution": 15}, "15"),
        ({"img_channels": 4}, "shape"),
        ({"label_dim": 10**12}, "label_dim"),
        ({"label_dim": 10}, "map_label"),
        ({"attn_resolutions": 16}, "attn_resolutions"),
        ({"dropout": float("nan")}, "dropout"),
        ({"sigma_data": 0}, "sigma_data"),
        ({"\x1b[2Jbad\n": 1}, "bad"),
    ],
)
def test_impossible_arguments_are_named(tmp_path, changes, said):
    with pytest.raises(TcmError, match=said) as caught:
        import_checkpoint(edm_pickle(tmp_path, **changes))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("outer", "inner", "said"),
    [
        ("VPPrecond", "SongUNet", "VPPrecond preconditions differently"),
        ("VEPrecond", "SongUNet", "VEPrecond preconditions differently"),
        ("iDDPMPrecond", "DhariwalUNet", "iDDPMPrecond preconditions differently"),
        ("EDMPrecond", "DhariwalUNet", "DhariwalUNet' is not supported; supported are: SongUNet, UNet, EDM2UNet"),
        ("EDMPrecond", "Transformer", "Transformer"),
        ("OtherPrecond", "SongUNet", "OtherPrecond is not known"),
        ("ECMPrecond", "SongUNet", "--as"),
    ],
)
def test_other_classes_are_refused_by_name(tmp_path, outer, inner, said):
    golden = Golden("ddpmpp_uncond_16")
    source = marking_source(tmp_path / "marker")
    path = save_pickle(tmp_path, network_pickle(golden.weights, golden.arguments, source, outer, ("model", inner)))
    with pytest.raises(TcmError, match=said):
        import_checkpoint(path)


def test_latent_models_are_refused(tmp_path):
    state = module_state({}, "", {})
    state["_modules"]["unet"] = Persistent("UNet", "", module_state({}, "", {}))
    content = {"ema": Persistent("Precond", "", state), "encoder": Persistent("StabilityVAEEncoder", "", {})}
    with published_names():
        path = save_pickle(tmp_path, pickle.dumps(content))
    with pytest.raises(TcmError, match="StabilityVAEEncoder"):
        import_checkpoint(path)


def test_one_tensor_under_many_names_cannot_fill_the_memory(tmp_path):
    shared = torch.randn(256, 256, 3, 3)
    weights = {f"model.enc.16x16_block{i}.conv{j}.weight": shared for i in range(8) for j in range(2)}
    torch.save({"model.enc.16x16_conv.weight": torch.randn(256, 3, 3, 3), **weights}, tmp_path / "a.pth")
    with pytest.raises(TcmError, match="larger than the file"):
        import_checkpoint(tmp_path / "a.pth", "consistency")


def test_metadata_that_is_no_sound_json(tmp_path):
    golden = Golden("ddpmpp_uncond_16")
    for text in ("{", "[" * 100_000, "9" * 10_000, '"SongUNet', "[1, 2"):
        save_file(golden.weights, tmp_path / "a.safetensors", {"model_type": '"SongUNet"', "channel_mult": text})
        with pytest.raises(TcmError, match="JSON"):
            import_checkpoint(tmp_path / "a.safetensors", "consistency")


def test_numbers_that_are_not_finite_are_named(tmp_path):
    golden = Golden("ddpmpp_uncond_16")
    golden.weights["model.map_layer0.bias"][3] = float("nan")
    save_file(golden.weights, tmp_path / "a.safetensors")
    with pytest.raises(TcmError, match=r"map_layer0\.bias"):
        import_checkpoint(tmp_path / "a.safetensors", "consistency")


def test_whole_import_survives_mutations(tmp_path):
    """A small but complete network: mutations reach the arguments, the names and the shapes."""
    network = tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1, attention=())
    card = tcm.ModelCard(kind="diffusion", network=network, image_shape=(1, 2, 2))
    export_state_dict(tcm.Model.fresh(card), tmp_path / "a.safetensors")
    weights, source = load_file(tmp_path / "a.safetensors"), marking_source(tmp_path / "marker")
    data = network_pickle(weights, reference_arguments(card), source, "EDMPrecond", ("model", "SongUNet"))
    path = save_pickle(tmp_path, data)
    assert import_checkpoint(path).model.sample(1).shape == (1, 1, 2, 2)
    rng = random.Random(8)
    refusals = []
    for _ in range(150):
        path.unlink()
        path.write_bytes(mutate(data, rng))
        try:
            import_checkpoint(path)
        except TcmError as error:
            refusals.append(str(error))
    assert 5 < len(refusals) < 145
    assert all(text.isprintable() for text in refusals)
    assert not (tmp_path / "marker").exists()


def test_licences_are_those_that_files_state():
    assert stated_licence("# NVIDIA Source Code License", "ECMPrecond").startswith("NVIDIA")
    assert "none stated" in stated_licence("import torch", "ECMPrecond")
    assert stated_licence(HEADER, "EDMPrecond") == "unknown; ask the publisher"


def test_command_line(tmp_path):
    path = edm_pickle(tmp_path)
    out = tmp_path / "model"
    runner = CliRunner()
    result = runner.invoke(app, ["import", str(path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    for said in ("EDMPrecond around a SongUNet", "1,033,507", "non-commercial", "loss_fn", "192 of 196"):
        assert said in result.output
    assert tcm.load(out).sample(2, steps=2).shape == (2, 3, 16, 16)
    again = runner.invoke(app, ["import", str(path), "--out", str(out)])
    assert isinstance(again.exception, TcmError)
    assert "exists" in str(again.exception)
    other = str(tmp_path / "other")
    result = runner.invoke(app, ["import", str(path), "--as", "consistency", "--second-time", "2", "--out", other])
    assert "times 80, 2" in result.output
    assert tcm.load(other).sampler == tcm.ConsistencySampler(second_time=2.0)
    result = runner.invoke(app, ["export", str(out), "--to", "edm-state-dict"])
    assert result.exit_code == 0, result.output
    exported = import_checkpoint(tmp_path / "model-edm.safetensors", "diffusion")
    assert exported.found.licence == "CC BY-NC-SA 4.0: non-commercial use only"
    second = runner.invoke(app, ["export", str(out), "--to", "edm-state-dict"])
    assert "exists" in str(second.exception)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "truncated"}, "t-prime"),
        ({"kind": "consistency", "t_prime": 1.0}, "t-prime"),
        ({"kind": "truncated", "t_prime": 100.0}, "between"),
        ({"kind": "truncated", "t_prime": float("nan")}, "between"),
        ({"kind": "diffusion", "second_time": 1.0}, "second-time=1.0 is for consistency models"),
        ({"kind": "consistency", "second_time": 80.0}, "second-time=80.0 must be at least 0.002 and below 80"),
        ({"kind": "truncated", "t_prime": 1.0, "second_time": 0.821}, "second-time=0.821 must be at least 1.0"),
        ({"kind": "consistency", "second_time": 0.0}, "second-time=0.0 must be"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, said):
    with pytest.raises(TcmError, match=said):
        import_checkpoint(edm_pickle(tmp_path), **options)


def test_files_that_are_not_there_or_of_no_kind(tmp_path):
    for name in ("missing.pkl", "missing.pth", "missing.safetensors"):
        with pytest.raises(TcmError, match="missing"):
            import_checkpoint(tmp_path / name)
    (tmp_path / "a.onnx").write_bytes(b"x")
    with pytest.raises(TcmError, match=r"\.onnx"):
        import_checkpoint(tmp_path / "a.onnx")
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(TcmError, match="is damaged"):
        import_checkpoint(tmp_path / "a.safetensors")
    with pytest.raises(TcmError, match="cannot be read"):
        import_checkpoint(tmp_path.with_suffix(".pkl"))
