"""Images become what transformers' processors of the Pillow backend make of them, and as many tokens."""

from __future__ import annotations

import hashlib
import io
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from frontend_svc.media.errors import MediaRefused, SettingsError
from frontend_svc.media.processing.processor import Item, MediaProcessor, ModelFiles
from tests.frontend_svc.media.pictures import encoded, picture

# Width and height.
SIZES = [(1, 1), (3, 5), (37, 41), (56, 56), (90, 33), (33, 90), (64, 300), (301, 67), (224, 224), (411, 409)]
UNCHECKED = 1 << 20

CLIP = {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}}
LARGER_CROP = {"size": {"shortest_edge": 31}, "crop_size": {"height": 42, "width": 45}}
OTHER_NUMBERS = {
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.9, 0.8, 0.7],
    "rescale_factor": 0.01,
    "resample": 2,
}
UNSCALED = {"do_rescale": False, "do_normalize": False}
QWEN = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 30}, "patch_size": 7}
TILES = {"size": {"longest_edge": 150}, "max_image_size": {"longest_edge": 40}}
GEMMA = {"size": {"height": 56, "width": 56}}

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llava-clip": ("llava", CLIPImageProcessorPil, CLIP),
    "llava-clip-larger-crop": ("llava", CLIPImageProcessorPil, LARGER_CROP),
    "llava-clip-no-crop": ("llava", CLIPImageProcessorPil, CLIP | {"do_center_crop": False}),
    "llava-clip-numbers": ("llava", CLIPImageProcessorPil, CLIP | OTHER_NUMBERS),
    "llava-clip-whole-numbers": ("llava", CLIPImageProcessorPil, {"size": 42, "crop_size": 42}),
    "llava-clip-unscaled": ("llava", CLIPImageProcessorPil, CLIP | UNSCALED),
    "llava-siglip": ("llava", SiglipImageProcessorPil, {"size": {"height": 42, "width": 56}}),
    "llava-own": ("llava", LlavaImageProcessorPil, CLIP),
    "llava-own-padded": ("llava", LlavaImageProcessorPil, CLIP | {"do_pad": True}),
    "qwen2_vl": ("qwen2_vl", Qwen2VLImageProcessorPil, QWEN),
    "qwen2_vl-defaults": ("qwen2_vl", Qwen2VLImageProcessorPil, {}),
    "qwen2_5_vl-pixels": (
        "qwen2_5_vl",
        Qwen2VLImageProcessorPil,
        {"min_pixels": 50 * 50, "max_pixels": 100 * 100, "merge_size": 1, "temporal_patch_size": 3},
    ),
    "idefics3": ("idefics3", Idefics3ImageProcessorPil, TILES),
    "idefics3-whole": ("idefics3", Idefics3ImageProcessorPil, TILES | {"do_image_splitting": False}),
    "idefics3-not-resized": ("idefics3", Idefics3ImageProcessorPil, TILES | {"do_resize": False}),
    "smolvlm": ("smolvlm", SmolVLMImageProcessorPil, TILES | OTHER_NUMBERS),
    "gemma3": ("gemma3", Gemma3ImageProcessorPil, GEMMA),
    "gemma3-numbers": ("gemma3", Gemma3ImageProcessorPil, GEMMA | OTHER_NUMBERS),
}


def processor(
    model_type: str, settings: dict[str, Any], prompt: dict[str, Any] | None = None, **options: object
) -> MediaProcessor:
    config = {"model_type": model_type, "vision_config": {"patch_size": 14}}
    files = ModelFiles(json.dumps(config), json.dumps(settings), json.dumps(prompt or {}))
    return MediaProcessor(files, "image", options)


def processed(image: Image.Image, *arguments: Any, **options: object) -> Item:
    return processor(*arguments, **options).process(encoded(image), max_positions=UNCHECKED)


def expected_tensors(model_type: str, theirs: dict[str, Any]) -> dict[str, Any]:
    """Those of the only image, in the form in which the engine gets them."""
    pixels = np.asarray(theirs["pixel_values"])
    if model_type.startswith("qwen"):
        return {"pixel_values": pixels, "image_grid_thw": np.asarray(theirs["image_grid_thw"])[0]}
    return {"pixel_values": pixels if model_type == "gemma3" else pixels[0]}


@pytest.mark.parametrize("name", CASES)
def test_tensors_equal_those_of_transformers(name: str) -> None:
    model_type, kind, settings = CASES[name]
    theirs = kind(**settings)
    saved = json.loads(theirs.to_json_string())
    for index, size in enumerate(SIZES):
        image = picture(*size, seed=index)
        expected = expected_tensors(model_type, theirs(images=[image], return_tensors="np"))
        # From the settings as they were written, and with all that transformers adds when it saves them.
        for given in (settings | {"image_processor_type": kind.__name__.removesuffix("Pil")}, saved):
            item = processed(image, model_type, given)
            assert set(item.tensors) == set(expected), size
            for tensor, value in expected.items():
                ours = item.tensors[tensor]
                assert ours.shape == value.shape, (size, tensor)
                assert ours.dtype == (np.int64 if tensor == "image_grid_thw" else np.float32)
                assert np.abs(ours - value).max() <= 1e-6, (size, tensor)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "CMYK", "1"])
def test_images_of_every_mode_equal_those_of_transformers(mode: str) -> None:
    image = picture(60, 50, mode="RGBA").convert("LA") if mode == "LA" else picture(60, 50, mode=mode)
    content = encoded(image, "JPEG" if mode == "CMYK" else "PNG")
    theirs = CLIPImageProcessorPil(**CLIP)(images=[Image.open(io.BytesIO(content))], return_tensors="np")
    ours = processor("llava", CLIP).process(content, max_positions=UNCHECKED).tensors["pixel_values"]
    assert np.abs(ours - theirs["pixel_values"][0]).max() <= 1e-6


def written(item: Item, token: str) -> str:
    return item.expansion.text.replace(token, token * item.expansion.run_length)


@pytest.mark.parametrize(("strategy", "additional"), [("default", 1), ("full", 1), ("full", 0)])
def test_llava_writes_a_token_for_each_patch(strategy: str, additional: int) -> None:
    prompt = {
        "patch_size": 7,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": additional,
        "image_token": "<picture>",
    }
    item = processed(picture(30, 20), "llava", CLIP, prompt)
    this = SimpleNamespace(**prompt)
    assert written(item, "<picture>") == LlavaProcessor.replace_image_token(
        this, {"pixel_values": [item.tensors["pixel_values"]]}, 0
    )
    assert item.expansion.num_positions == 36 + additional - (strategy == "default")


def test_llava_without_a_processor_config_reads_the_config() -> None:
    config = {
        "model_type": "llava",
        "vision_feature_select_strategy": "full",
        "vision_config": {"patch_size": 7, "model_type": "clip_vision_model"},
    }
    ours = MediaProcessor(ModelFiles(json.dumps(config), json.dumps(CLIP)), "image")
    assert ours.process(encoded(picture(9, 9)), max_positions=37).expansion.num_positions == 37


def test_qwen2_vl_writes_a_token_for_each_merged_patch() -> None:
    for size in SIZES:
        item = processed(picture(*size), "qwen2_vl", QWEN)
        this = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2), image_token="<|image_pad|>")
        theirs = Qwen2VLProcessor.replace_image_token(
            this, {"image_grid_thw": [item.tensors["image_grid_thw"]]}, 0
        )
        assert written(item, "<|image_pad|>") == theirs
        assert item.expansion.num_positions * 4 == len(item.tensors["pixel_values"])


@pytest.mark.parametrize("splits", [True, False])
def test_idefics3_and_smolvlm_write_rows_and_columns_of_tiles(splits: bool) -> None:
    settings = TILES | {"do_image_splitting": splits}
    tags = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "image_seq_len": 5}
    idefics = SimpleNamespace(**tags, global_image_tag="<global-img>")
    smol = SimpleNamespace(**tags, global_image_token="<global-img>")
    for size in SIZES:
        item = processed(picture(*size), "smolvlm", settings, {"image_seq_len": 5})
        theirs = Idefics3ImageProcessorPil(**settings, return_row_col_info=True)(images=[picture(*size)])
        assert written(item, "<image>") == Idefics3Processor.replace_image_token(idefics, theirs, 0)
        assert written(item, "<image>") == SmolVLMProcessor.replace_image_token(smol, theirs, 0)
        assert item.expansion.num_positions == 5 * len(item.tensors["pixel_values"])


def test_gemma3_writes_the_same_for_all_images() -> None:
    item = processed(picture(30, 90), "gemma3", GEMMA, {"image_seq_length": 7})
    sequence = "\n\n<start_of_image>" + "<image_soft_token>" * 7 + "<end_of_image>\n\n"
    this = SimpleNamespace(full_image_sequence=sequence)
    assert written(item, "<image_soft_token>") == Gemma3Processor.replace_image_token(
        this, {"num_crops": [0]}, 0
    )


def test_newer_checkpoints_have_all_settings_in_one_file() -> None:
    prompt = {"image_processor": CLIP | {"image_processor_type": "CLIPImageProcessor"}, "patch_size": 7}
    item = processed(picture(9, 9), "llava", {"size": 13}, prompt)
    assert item.tensors["pixel_values"].shape == (3, 42, 42) and item.expansion.num_positions == 36


def test_special_tokens_are_those_of_the_tokenizer() -> None:
    for tokens in ({"image_token": "<p>"}, {"extra_special_tokens": {"image_token": "<p>"}}):
        files = ModelFiles('{"model_type": "qwen2_vl"}', tokenizer_config=json.dumps(tokens))
        assert MediaProcessor(files, "image").token == "<p>"


def test_options_of_a_request_change_the_settings() -> None:
    image = picture(300, 300)
    assert processed(image, "qwen2_vl", {}, max_pixels=100 * 100).expansion.num_positions == 9
    assert processed(image, "smolvlm", TILES, do_image_splitting=False).expansion.num_runs == 1
    with pytest.raises(SettingsError, match="max_pixels is 'many', must be a whole number"):
        processor("qwen2_vl", {}, max_pixels="many")
    with pytest.raises(SettingsError, match="crop_size is no option of models of type 'llava': none"):
        processor("llava", {}, crop_size=7)
    with pytest.raises(SettingsError, match="do_pan_and_scan is not served"):
        processor("gemma3", {}, do_pan_and_scan=True)


@pytest.mark.parametrize(
    ("model_type", "settings", "cause"),
    [
        ("llama", {}, "models of type 'llama' take no image"),
        ("qwen2_audio", {}, "take no image"),
        ("llava", {"image_processor_type": "ViTImageProcessor"}, "'ViTImageProcessor' is not served"),
        ("llava", {"size": {"shortest_edge": 9, "longest_edge": 9}}, "size must be"),
        ("llava", {"resample": "bicubic"}, "resample is 'bicubic'"),
        ("llava", {"image_mean": [1, 2]}, "image_mean is"),
        ("qwen2_vl", {"do_resize": False}, "do_resize"),
        ("qwen2_vl", {"patch_size": 0}, "patch_size is 0, must be a whole number in 1"),
        ("gemma3", {"size": {"height": 1 << 20, "width": 4}}, "height is"),
        ("idefics3", {"max_image_size": 7}, "max_image_size is 7, must be an object"),
    ],
)
def test_settings_that_are_not_served_are_refused_by_name(
    model_type: str, settings: dict[str, Any], cause: str
) -> None:
    with pytest.raises(SettingsError, match=cause):
        processor(model_type, settings)


def test_settings_must_be_json_objects() -> None:
    for files in (ModelFiles("{"), ModelFiles("[]"), ModelFiles('{"model_type": "llava"}', "[1]")):
        with pytest.raises(SettingsError):
            MediaProcessor(files, "image")


def test_images_that_a_model_does_not_take_are_refused() -> None:
    line = Image.new("RGB", (20_000, 1))
    with pytest.raises(MediaRefused, match="at most 200 times"):
        processed(line, "qwen2_vl", {})
    with pytest.raises(MediaRefused, match="must be at most"):
        processed(line, "llava", {"size": 336, "crop_size": 336})
    with pytest.raises(MediaRefused, match="must be at most"):
        processed(line, "llava", CLIP | {"image_processor_type": "LlavaImageProcessor", "do_pad": True})
    with pytest.raises(MediaRefused, match="takes 4 positions of the prompt, the model takes 3 at most"):
        processor("qwen2_vl", {}).process(encoded(picture(9, 9)), max_positions=3)


def test_the_hash_is_of_the_tensors() -> None:
    item = processed(picture(60, 60), "qwen2_vl", {})
    grid, pixels = item.tensors["image_grid_thw"], item.tensors["pixel_values"]
    content = b"image_grid_thw:int64:3;" + grid.tobytes()
    content += b"pixel_values:float32:%d,1176;" % len(pixels) + pixels.tobytes()
    assert item.hash == hashlib.sha256(content).hexdigest()
    assert processed(picture(60, 60, seed=1), "qwen2_vl", {}).hash != item.hash
