"""Pretrained backbones: weights from files, encoders of transformers, preprocessing."""

import json

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionModel
from hf_sphere.models.backbones import create_backbone
from hf_sphere.models.pretrained_backbones import pretrained_preprocessing

TINY = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
ENCODERS = {
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**TINY)),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**TINY, intermediate_size=32)),
    "swin": lambda: transformers.SwinModel(
        transformers.SwinConfig(
            embed_dim=8, depths=[1, 1], num_heads=[1, 1], window_size=4, image_size=32, drop_path_rate=0.0
        )
    ),
    "convnext": lambda: transformers.ConvNextModel(
        transformers.ConvNextConfig(num_stages=3, hidden_sizes=[4, 8, 16], depths=[1, 1, 1])
    ),
}


@pytest.fixture(params=ENCODERS)
def encoder(request, tmp_path):
    """A tiny encoder of transformers, and the folder that it is saved in."""
    torch.manual_seed(0)
    model = ENCODERS[request.param]().eval()
    model.save_pretrained(tmp_path / "own" / "tiny")
    return model, str(tmp_path / "own" / "tiny")


class TestTransformers:
    def test_features_are_those_of_the_encoder_have_gradients_and_survive_saving(self, encoder, tmp_path):
        model, folder = encoder
        config = SphereVisionConfig(backbone=folder, image_size=28, head="cosine", num_labels=3)
        own = SphereVisionForImageClassification(config, pretrained=folder).eval()
        pixels = torch.randn(2, 3, 28, 28)
        output = own.base_model(pixels, output_hidden_states=True)
        torch.testing.assert_close(output.embeddings, own.base_model(pixels).embeddings)
        expected = model.base_model(pixels, output_hidden_states=True)
        has_pooler = not isinstance(model, transformers.ViTForImageClassification)  # whose linear one is left out
        features = expected.pooler_output.flatten(1) if has_pooler else expected.last_hidden_state[:, 0]
        torch.testing.assert_close(output.embeddings, features)
        torch.testing.assert_close(output.hidden_states, tuple(expected.hidden_states))
        own(pixels, torch.tensor([0, 2])).loss.backward()
        assert [name for name, p in own.named_parameters() if p.requires_grad and p.grad is None] == []
        own.save_pretrained(tmp_path / "saved")
        again = SphereVisionForImageClassification.from_pretrained(tmp_path / "saved").eval()
        assert torch.equal(again.base_model(pixels).embeddings, output.embeddings)
        text = (tmp_path / "saved" / "config.json").read_text()
        assert str(tmp_path) not in text
        assert json.loads(text)["backbone"] == "tiny"

    @pytest.mark.parametrize("encoder", ["vit", "dinov2", "swin"], indirect=True)
    def test_the_stock_trainer_resumes_exactly(self, encoder, tmp_path):
        config = SphereVisionConfig(backbone=encoder[1], image_size=28, head="cosine", num_labels=3)
        rows = [{"pixel_values": torch.randn(3, 28, 28), "labels": index % 3} for index in range(8)]
        options = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
        models = [SphereVisionForImageClassification(config) for _ in range(2)]
        for model, checkpoint in zip(models, (None, str(tmp_path / "checkpoint-1")), strict=True):
            args = transformers.TrainingArguments(str(tmp_path), disable_tqdm=True, **options)
            transformers.Trainer(model, args, train_dataset=rows).train(resume_from_checkpoint=checkpoint)
        trained, resumed = (model.state_dict() for model in models)
        assert all(torch.equal(trained[name], resumed[name]) for name in trained)

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
    @torch.no_grad()
    def test_the_dtype_is_that_asked_for_and_not_that_of_the_file(self, half, encoder, tmp_path):
        model, folder = encoder
        model.to(half).save_pretrained(folder)
        config = SphereVisionConfig(backbone=folder, image_size=28, head="cosine", num_labels=3)
        own = SphereVisionForImageClassification(config, pretrained=True).eval()
        for parameter in own.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))  # stands for training
        own.save_pretrained(tmp_path / "saved")
        values = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert "dtype" not in values["backbone_config"]
        values["backbone_config"]["dtype"] = str(half).removeprefix("torch.")  # as earlier versions saved it
        (tmp_path / "saved" / "config.json").write_text(json.dumps(values))
        pixels = torch.randn(2, 3, 28, 28)
        expected = own(pixels).embeddings
        for dtype, found in ((None, torch.float32), (torch.float32,) * 2, (half, half), ("auto", torch.float32)):
            options = {} if dtype is None else {"dtype": dtype}
            loaded = SphereVisionForImageClassification.from_pretrained(tmp_path / "saved", **options).eval()
            assert {parameter.dtype for parameter in loaded.parameters()} == {found}
            error = 1e-6 if found == torch.float32 else 0.05
            torch.testing.assert_close(loaded(pixels).embeddings.float(), expected, rtol=0, atol=error)

    def test_a_folder_or_file_of_weights_in_half_precision_is_loaded_and_trained_in_float32(self, encoder):
        model, folder = encoder
        model.bfloat16().save_pretrained(folder)
        config, own = SphereVisionConfig(backbone=folder, image_size=28), model.float().base_model.state_dict()
        for source in (True, f"{folder}/model.safetensors"):
            loaded = SphereVisionModel(config, pretrained=source).backbone.encoder
            assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
            assert all(torch.equal(own[name], value) for name, value in loaded.state_dict().items())

    def test_settings_of_the_use_of_an_encoder_do_not_apply_to_the_model_but_those_asked_for(self, tmp_path):
        use = {"return_dict": False, "output_hidden_states": True, "output_attentions": True}
        transformers.ViTForImageClassification(
            transformers.ViTConfig(**TINY, **use, attn_implementation="eager")
        ).save_pretrained(tmp_path)
        model = SphereVisionModel(SphereVisionConfig(backbone=str(tmp_path), image_size=28), pretrained=True)
        assert list(model.backbone.encoder(torch.randn(1, 3, 28, 28))) == ["last_hidden_state"]
        model.save_pretrained(tmp_path / "saved")
        for kind in ("eager", "sdpa"):
            model = SphereVisionModel.from_pretrained(tmp_path / "saved", attn_implementation=kind)
            assert model.backbone.encoder.config._attn_implementation == kind

    @pytest.mark.parametrize(
        ("name", "options"),
        [("resnet10t", {}), ("mobilenetv3_small_050", {}), ("vit_tiny_patch16_224", {"img_size": 32, "depth": 1})],
    )
    @torch.no_grad()
    def test_a_model_that_timm_saved_for_the_hub_is_an_encoder(self, name, options, tmp_path):
        model = timm.create_model(name, num_classes=5, **options).eval().bfloat16()
        timm.models.save_for_hf(model, tmp_path, model_args=options, safe_serialization=True)
        own = SphereVisionModel(SphereVisionConfig(backbone=str(tmp_path), image_size=32), pretrained=True).eval()
        pixels = torch.randn(2, 3, 32, 32)
        found, model = own(pixels).embeddings, model.float()
        torch.testing.assert_close(found, model.forward_head(model.forward_features(pixels), pre_logits=True))
        assert own.embedding_dim == found.shape[1]

    def test_the_vision_part_of_clip_is_an_encoder(self, tmp_path):
        text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9, "eos_token_id": 1}
        model = transformers.CLIPModel(
            transformers.CLIPConfig(vision_config=TINY, text_config=text | {"bos_token_id": 0})
        ).eval()
        model.save_pretrained(tmp_path)
        config = SphereVisionConfig(backbone=str(tmp_path), image_size=28)
        pixels = torch.randn(2, 3, 28, 28)
        found = SphereVisionModel(config, pretrained=True).eval()(pixels).embeddings
        torch.testing.assert_close(found, model.vision_model(pixels).pooler_output)

    def test_blocks_are_the_layers_to_decay(self, encoder):
        _, folder = encoder
        backbone = SphereVisionModel(SphereVisionConfig(backbone=folder, image_size=28)).backbone
        groups = timm.models.group_parameters(backbone, backbone.group_matcher(coarse=True))
        assert len(groups) == {"dinov2": 4, "vit": 4, "swin": 3, "convnext": 4}[backbone.encoder.config.model_type]

    @pytest.mark.parametrize(
        "model",
        [
            transformers.MobileNetV2Model(transformers.MobileNetV2Config(depth_multiplier=0.1)),
            transformers.MobileViTModel(
                transformers.MobileViTConfig(hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 4, 4, 8, 8, 8, 20])
            ),
        ],
        ids=["mobilenet_v2", "mobilevit"],
    )
    @torch.no_grad()
    def test_features_are_counted_where_the_configuration_does_not_name_them(self, model, tmp_path):
        model.save_pretrained(tmp_path)
        own = SphereVisionModel(SphereVisionConfig(backbone=str(tmp_path), image_size=64), pretrained=True).eval()
        pixels = torch.randn(2, 3, 64, 64)
        found = own(pixels).embeddings
        torch.testing.assert_close(found, model.eval()(pixels).pooler_output)
        assert own.embedding_dim == found.shape[1]

    @torch.no_grad()
    def test_features_without_pooler_and_class_token_are_the_mean_and_of_masked_autoencoders_of_whole_images(
        self, tmp_path
    ):
        pixels = torch.randn(2, 3, 28, 28)
        for model in (
            transformers.IJepaModel(transformers.IJepaConfig(**TINY)).eval(),
            transformers.ViTMAEModel(transformers.ViTMAEConfig(**TINY)),
        ):
            model.save_pretrained(tmp_path)
            own = SphereVisionModel(SphereVisionConfig(backbone=str(tmp_path), image_size=28), pretrained=True).eval()
            model.config.mask_ratio = 0.0
            states = model.eval()(pixels).last_hidden_state
            expected = states.mean(1) if isinstance(model, transformers.IJepaModel) else states[:, 0]
            torch.testing.assert_close(own(pixels).embeddings, expected)

    def test_images_of_another_size_are_accepted(self, tmp_path):
        ENCODERS["vit"]().save_pretrained(tmp_path)
        model = SphereVisionModel(SphereVisionConfig(backbone=str(tmp_path), image_size=56))
        assert model(torch.randn(1, 3, 56, 56)).embeddings.shape == (1, 16)

    def test_preprocessing_is_that_of_the_image_processor(self, encoder):
        _, folder = encoder
        assert pretrained_preprocessing(folder) == {}
        transformers.BitImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}, image_mean=[0.1] * 3, image_std=[0.2] * 3
        ).save_pretrained(folder)
        found = pretrained_preprocessing(folder)
        assert found["crop_pct"] == 0.875
        assert found["image_size"] == [28, 28]
        assert (found["image_mean"], found["image_std"], found["num_channels"]) == ([0.1] * 3, [0.2] * 3, 3)


class TestWeightFiles:
    def weights(self, tmp_path, name: str = "resnet10t", kind: str = "safetensors", **options):
        """Save the weights of a timm model with its classifier, and return them and the file."""
        state = timm.create_model(name, num_classes=5, **options).state_dict()
        file = tmp_path / f"weights.{kind}"
        if kind == "safetensors":
            save_file(state, file)
        else:  # as data-parallel training saves them
            torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, file)
        return state, str(file)

    @pytest.mark.parametrize("kind", ["safetensors", "pth"])
    def test_all_tensors_but_the_classifier_are_loaded(self, kind, tmp_path, caplog):
        caplog.set_level("INFO")
        state, file = self.weights(tmp_path, kind=kind)
        own = create_backbone("resnet10t", num_channels=3, image_size=32, pretrained=file).state_dict()
        assert all(torch.equal(state[name], value) for name, value in own.items())
        assert "not used: fc.weight, fc.bias" in caplog.text or "not used: fc.bias, fc.weight" in caplog.text

    def test_gray_images_use_the_summed_filters_and_other_sizes_resampled_positions(self, tmp_path):
        state, file = self.weights(tmp_path, "vit_tiny_patch16_224", img_size=32)
        own = create_backbone("vit_tiny_patch16_224", num_channels=1, image_size=64, pretrained=file)
        expected = state["patch_embed.proj.weight"].sum(dim=1, keepdim=True)
        torch.testing.assert_close(own.patch_embed.proj.weight, expected)
        assert own.pos_embed.shape[1] == 17


def test_preprocessing_of_a_timm_model_is_that_of_its_weights_and_of_our_backbones_unknown():
    assert pretrained_preprocessing("lenet5") == {}
    found = pretrained_preprocessing("vit_tiny_patch16_224")
    assert found["crop_pct"] == 0.9
    assert (found["image_size"], found["image_mean"], found["num_channels"]) == ([224, 224], [0.5] * 3, 3)
