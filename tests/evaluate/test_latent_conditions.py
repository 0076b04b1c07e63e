"""Conditions in latents: U-Nets that inpaint, edit and estimate depth, from and to diffusers' pipelines."""

import re
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from ddpm_ds.cli.main import main
from ddpm_ds.data.captions import EncodedPrompts
from ddpm_ds.data.latents import rectangles
from ddpm_ds.diffusion.condition import Condition, no_text
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.diffusion.spec import SamplerSpec
from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.sampling import sample
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.ground import keyed
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet
from tests.evaluate.planted import difference, refusal
from tests.evaluate.test_text_pipelines import (
    ANY_ENCODERS,
    base_spec,
    checkpoint_of,
    import_of,
    import_words,
    write_pipeline_of,
)

CPU = torch.device("cpu")
USES: dict[str, dict[str, Any]] = {
    "inpaint": {"kind": "cut_out"},
    "edit": {"kind": "stored", "path": "photos", "scaled": False, "drop": 0.1},
    "depth": {"kind": "stored", "path": "photos"},
}
OF_ORDER = {"inpaint": [0, 1, 2, 3, 8, 4, 5, 6, 7], "edit": [*range(8)], "depth": [4, 5, 6, 7, 0, 1, 2, 3]}
"""Our numbers of input channels in diffusers' order: x_t, mask, image; and Marigold's image, x_t."""
OPENED = {
    ("inpaint", "sd"): "StableDiffusionInpaintPipeline",
    ("inpaint", "sdxl"): "StableDiffusionXLInpaintPipeline",
    ("edit", "sd"): "StableDiffusionInstructPix2PixPipeline",
    ("edit", "sdxl"): "StableDiffusionXLInstructPix2PixPipeline",
    ("cosxl", "sdxl"): "StableDiffusionXLInstructPix2PixPipeline",
    ("depth", "sd"): "MarigoldDepthPipeline",
}


@pytest.fixture(scope="module", params=["sd", "sdxl"])
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline_of(tmp_path_factory.mktemp("pipelines") / request.param, request.param, shift_factor=None)


def base_of(folder: Path, pipeline: Path, use: str) -> Path:
    folder.mkdir(exist_ok=True)
    return base_spec(folder, autoencoder=str(pipeline / "vae"), condition=USES[use])


@pytest.mark.parametrize("use", USES)
def test_a_u_net_without_a_condition_begins_as_it_is(
    pipeline: Path, use: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, before = import_of(pipeline, base_spec(tmp_path, autoencoder=str(pipeline / "vae")), tmp_path / "plain")
    spec, after = import_of(pipeline, base_of(tmp_path / "base", pipeline, use), tmp_path / "out")
    halved = use == "depth" and pipeline.name == "sd"
    more = len(OF_ORDER[use]) - 4
    said = f"conv_in reads {more} channels of data.condition, with {'halves of its own' if halved else 'zeros'}"
    assert said in capsys.readouterr().out
    layers = unet_layers(spec.unet, spec.data.interface)
    (first,) = (name for name in before if before[name].shape != after[name].shape)
    old, new = before[first], after[first]
    if halved:
        assert torch.equal(new, torch.cat((old, old), dim=-1) / 2)
    else:
        assert torch.equal(new[..., :4], old) and new.shape[-1] == 4 + more and not new[..., 4:].any()
    assert all(torch.equal(after[name], before[name]) for name in before if name != first), "biases too"

    mine, theirs = UNet(layers, 0).eval(), UNet(unet_layers(plain.unet, plain.data.interface), 0).eval()
    mine.layers.load_state_dict(after)
    theirs.layers.load_state_dict(before)
    assert spec.unet.text is not None
    x_t, t, context = (
        torch.randn(2, 4, 16, 16),
        torch.tensor([3, 900]),
        torch.randn(2, 77, spec.unet.text.context_channels),
    )
    vector = () if spec.unet.text.pooled_channels is None else (torch.randn(2, spec.unet.text.pooled_channels + 6),)
    given = x_t if halved else torch.randn(2, more, 16, 16)
    with torch.no_grad():
        found = mine(torch.cat((x_t, given), dim=1), t, *vector, context=context)
        wanted = theirs(x_t, t, *vector, context=context)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def conditioned(pipeline: Path, folder: Path, use: str, **changes: Any) -> Path:
    condition = USES["depth" if use == "cosxl" else use] | ({"drop": 0.1} if use == "cosxl" else {})
    return checkpoint_of(pipeline, folder, "eps", condition=condition, **changes)


def drawn(trained: Trained, condition: Tensor, sampler: SamplerSpec) -> tuple[Tensor, EncodedPrompts]:
    """Our latents for a condition, and the encoded prompt."""
    known = EncodedPrompts.of(trained.text, ["a red circle"], CPU, print)  # type: ignore[arg-type]
    own, index = Condition(condition, ()), torch.arange(1)
    drawing = Drawing(
        Sampler(sampler, trained.diffusion),
        seed=0,
        index=index,
        shape=trained.image_shape,
        conditions=trained.prompts(known).beside(own, index, own.each(torch.zeros_like)),
    )
    with torch.no_grad():
        for number in range(drawing.calls):
            drawing.take(trained.unet(*drawing.inputs(), context=drawing.context(number)))
    return drawing.images(), known


@pytest.mark.parametrize(("pipeline", "use"), [(kind, use) for use, kind in OPENED], indirect=["pipeline"])
def test_diffusers_draws_the_latents_that_we_draw_and_the_export_is_imported_again(
    pipeline: Path, use: str, tmp_path: Path
) -> None:
    checkpoint, hub = conditioned(pipeline, tmp_path, use), tmp_path / "hub"
    assert main(["export", str(checkpoint), str(hub)]) == 0
    trained, name = load_trained(checkpoint), OPENED[use, pipeline.name]
    opened = diffusers.DiffusionPipeline.from_pretrained(hub)
    opened.set_progress_bar_config(disable=True)
    assert type(opened).__name__ == name and f"import {name}" in (hub / "README.md").read_text()
    # Without rounding of the noise to a step of diffusers' own, the last step ends at the image.
    config = {"timestep_spacing": "trailing", "set_alpha_to_one": True}
    if use == "depth":
        assert config.items() <= dict(opened.scheduler.config).items(), "as Marigold"
    opened.scheduler = diffusers.DDIMScheduler.from_config(opened.scheduler.config, **config)

    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (1, 3, 32, 32), generator=generator, dtype=torch.uint8)
    image = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    hole = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    hole[:, :, 5:21, 9:32] = True
    mask = Image.fromarray((hole[0, 0] * 255).byte().numpy())
    vae = opened.vae
    with torch.no_grad():
        vae.quant_conv.weight[4:], vae.quant_conv.bias[4:] = 0.0, -30.0  # inpainting draws latents, here of no variance
        unit = pixels.float() / 127.5 - 1.0
        latents = vae.encode(unit * ~hole if use == "inpaint" else unit).latent_dist.mean
    latents = latents if use == "edit" else latents * vae.config.scaling_factor
    given = torch.cat((latents, hole[..., ::2, ::2].float()), dim=1) if use == "inpaint" else latents
    values: dict[str, Any] = {"kind": "ddim", "steps": 4, "clip": "none"}
    if use in ("edit", "cosxl"):
        values |= {"guidance": 7.5, "condition_guidance": 1.5}
    elif use == "inpaint":
        values["guidance"] = 3.0
    sampler = SamplerSpec(**values)
    ours, known = drawn(trained, given, sampler)
    (tmp_path / "mine").mkdir()
    image.save(tmp_path / "mine" / "photo.png")
    mask.save(tmp_path / "mine" / "photo-masklabel.png")
    asked: dict[str, Any] = {"conditions": tmp_path / "mine", "sampler": sampler, "members": 1}
    asked["prompts"] = "a red circle"
    assert difference(sample(trained, **asked)[:, 0], trained.finished(ours)) <= 1, "the whole way from files"

    noise = keyed.normal(0, Stream.SAMPLE, torch.arange(1), ours.numel()).reshape(ours.shape)
    against = no_text(trained.text, known.empty)  # type: ignore[arg-type]
    if use == "depth":
        opened.empty_text_embedding = known.encoded.tokens.float()
        found = opened(image, num_inference_steps=4, latents=noise, output_latent=True, processing_resolution=0).latent
    else:
        words = {"prompt_embeds": known.encoded.tokens, "negative_prompt_embeds": against.tokens}
        if known.encoded.pooled is not None and against.pooled is not None:
            words |= {"pooled_prompt_embeds": known.encoded.pooled, "negative_pooled_prompt_embeds": against.pooled}
        options: dict[str, Any] = {name: part.float() for name, part in words.items()}
        options |= {"mask_image": mask, "strength": 1.0, "height": 32, "width": 32} if use == "inpaint" else {}
        options |= {} if use == "inpaint" else {"image_guidance_scale": 1.5}
        options |= {"guidance_scale": values["guidance"], "num_inference_steps": 4, "output_type": "latent"}
        found = opened(image=image, latents=noise, **options).images
    torch.testing.assert_close(found, ours, rtol=1e-5, atol=1e-5 * ours.abs().max().item())

    base = base_of(tmp_path / "base", pipeline, "depth" if use == "cosxl" else use)
    weights = import_of(hub, base, tmp_path / "again")[1]
    state = trained.unet.layers.state_dict()
    assert weights.keys() == state.keys() and all(torch.equal(weights[name], state[name]) for name in state)
    exported = load_trained(hub)
    assert all(torch.equal(exported.unet.layers.state_dict()[name], state[name]) for name in state)
    stored = load_file(hub / "unet" / "diffusion_pytorch_model.safetensors")["conv_in.weight"]
    mine = next(tensor for name, tensor in state.items() if name.endswith("conv.weight") and tensor.shape[-1] > 4)
    order = OF_ORDER["edit" if use == "cosxl" else use]
    assert torch.equal(stored, mine.permute(0, 3, 1, 2)[:, order])
    one = tmp_path / "one.safetensors"
    assert main(["export", str(checkpoint), str(one)]) == 0
    assert torch.equal(load_file(one)["model.diffusion_model.input_blocks.0.0.weight"], stored)
    weights = import_of(one, base, tmp_path / "of one", ANY_ENCODERS)[1]
    assert all(torch.equal(weights[name], state[name]) for name in state)
    # A pipeline from elsewhere has no fields.json.
    (hub / "fields.json").unlink()
    again = load_trained(hub)
    assert again.data.condition is not None and exported.data.condition is not None
    assert (again.data.condition.kind, again.data.condition.scaled) == (
        exported.data.condition.kind,
        exported.data.condition.scaled,
    )
    assert all(torch.equal(again.unet.layers.state_dict()[name], state[name]) for name in state)
    assert difference(sample(again, **asked)[:, 0], trained.finished(ours)) <= 1


@pytest.mark.parametrize("pipeline", ["sd"], indirect=True)
def test_pictures_and_masks_of_a_user_are_inputs_with_prompts_of_their_own(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, photos = conditioned(pipeline, tmp_path, "inpaint"), tmp_path / "photos"
    trained, sampler = load_trained(checkpoint), SamplerSpec(kind="ddim", steps=2, clip="none")
    photos.mkdir()
    for number in range(2):
        Image.fromarray(np.full((40, 64, 3), 90 * number + 30, np.uint8)).save(photos / f"{number}.png")
    asked: dict[str, Any] = {"sampler": sampler, "members": 2}
    both = sample(trained, conditions=photos, prompts=["a red circle", "a"], **asked)
    assert both.shape == (2, 2, 3, 32, 32)
    inputs = Inputs.open(photos, trained)
    wanted = rectangles(Draws(0, torch.arange(2), {Stream.CUT: 4}).uniform(Stream.CUT), (0.25, 0.75), (32, 32))
    holes = inputs.condition([0, 1], CPU).channels[:, 4:]
    assert torch.equal(holes, wanted[..., ::2, ::2].float()), "without masks rectangles"
    truth, shown = inputs.truth([0, 1]), inputs.shown([0, 1])
    assert truth is not None and truth.unique().tolist() == [30, 120] and shown is not None
    assert shown.shape == truth.shape == (2, 3, 32, 32)
    alone = sample(trained, 1, conditions=photos, prompts="a red circle", **asked)
    second = sample(trained, 1, first=1, conditions=photos, prompts=["a red circle", "a"], **asked)
    assert difference(torch.cat((alone, second)), both) <= 1, "an input and its prompt have one number"
    one = sample(trained, conditions=photos / "1.png", prompts=["a", "red", "circle"], **asked)
    assert one.shape == (3, 2, 3, 32, 32), "one photo for each prompt"
    assert sample(trained.resized((24, 48)), conditions=photos, **asked).shape == (2, 2, 3, 24, 48)

    hole = np.zeros((40, 64), np.uint8)
    hole[:, 32:] = 255
    Image.fromarray(hole).save(photos / "1-masklabel.png")
    found = Inputs.open(photos / "1.png", trained).condition([0], CPU).channels[0, 4]
    assert torch.equal(found, torch.arange(16).ge(8).float().expand(16, 16)), "cropped like its photo"
    lines, out = tmp_path / "prompts.txt", tmp_path / "out"
    lines.write_text("a --d 3\nred circle --l 2 --n a\n")
    words = ["sample", checkpoint, "--sampler", "ddim", "--steps", "2", "--prompts", lines, "--out", out]
    given = [*words, "--members", "1", "--device", "cpu", "--conditions"]
    assert main([str(word) for word in [*given, photos / "1.png"]]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["000000.png", "000001.png"]
    shutil.rmtree(out)
    assert "0-masklabel.png is missing, and other pictures have a mask; add it" in refusal(capsys, *given, photos)
    Image.fromarray(hole[:20]).save(photos / "0-masklabel.png")
    with pytest.raises(DataError, match=r"0-masklabel.png, a mask, can't be read \(its picture has another size\)$"):
        Inputs.open(photos, trained).condition([0], CPU)


@pytest.mark.parametrize("pipeline", ["sd"], indirect=True)
def test_a_condition_that_a_model_or_a_pipeline_lacks_is_refused(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = base_spec(tmp_path, autoencoder=str(pipeline / "vae"))
    assert main(["export", str(conditioned(pipeline, tmp_path / "run", "inpaint")), str(tmp_path / "hub")]) == 0
    for base, why in (
        (plain, "data.condition.kind = None, but the model of .* has cut_out; --set data.condition.kind=cut_out"),
        (
            base_of(tmp_path / "edit", pipeline, "edit"),
            "data.condition.kind = stored, but the model of .* has cut_out;",
        ),
    ):
        assert re.search(why, refusal(capsys, *import_words(tmp_path / "hub", base, tmp_path / "no")))
    words = import_words(tmp_path / "hub" / "unet", tmp_path / "edit" / "base.yaml", tmp_path / "no", ANY_ENCODERS)
    assert re.search("data.condition has 4 channels, but the model of .* takes 5; change", refusal(capsys, *words))
    assert main(["export", str(conditioned(pipeline, tmp_path / "depth", "depth")), str(tmp_path / "marigold")]) == 0
    words = import_words(tmp_path / "marigold", tmp_path / "edit" / "base.yaml", tmp_path / "no")
    assert "data.condition.scaled = False, but the model" in refusal(capsys, *words)

    shifted = write_pipeline_of(tmp_path / "sd", "sd")
    line = refusal(capsys, "export", conditioned(shifted, tmp_path / "shifted", "edit"), tmp_path / "no")
    assert "data.condition.scaled is false, and a pipeline's latents are without the shift and scales" in line
    line = refusal(capsys, *import_words(pipeline, plain, tmp_path / "no", "sampler.condition_guidance=1.5"))
    assert "sampler.condition_guidance = 1.5 needs text and data.condition.drop, and no guide" in line
