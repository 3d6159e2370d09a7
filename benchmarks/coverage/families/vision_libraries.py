"""Detection, reading of text, segmentation by prompts, and vision transformers of other libraries."""

import importlib

import torch
from cases import CASES, Case, case, images, randn
from torch import nn

IMAGES, MORE_IMAGES = [(2, 64), (3, 96)], [(1, 128), (2, 160)]
SQUARES, MORE_SQUARES = [(2, 32), (3, 32)], [(1, 32), (5, 32)]


def _of_ultralytics(name):
    def make():
        from ultralytics.nn import tasks

        kinds = {
            "-seg": tasks.SegmentationModel,
            "-pose": tasks.PoseModel,
            "-cls": tasks.ClassificationModel,
            "-obb": tasks.OBBModel,
        }
        kind = next((kind for end, kind in kinds.items() if name.endswith(end)), tasks.DetectionModel)
        model = kind(f"{name}.yaml", verbose=False)
        return model, lambda batch, side: model(images(batch, side))

    CASES.append(Case(name, "detection", make, IMAGES, MORE_IMAGES))


for _name in (
    "yolov3-tiny",
    "yolov5n",
    "yolov8n",
    "yolov10n",
    "yolo11n",
    "yolo11n-seg",
    "yolo11n-pose",
    "yolo11n-cls",
    "yolo11n-obb",
    "yolo12n",
    "yolo26n",
):
    _of_ultralytics(_name)


def _of_doctr(name, kind, recorded, truth):
    def make():
        models = importlib.import_module(f"doctr.models.{kind}")
        model = getattr(models, name)(pretrained=False, pretrained_backbone=False, exportable=True)
        return model, lambda batch, width: model(images(batch, 32 if kind == "recognition" else 64, width))

    CASES.append(Case(name, "reading text", make, recorded, truth))


for _name in ("db_mobilenet_v3_large", "linknet_resnet18"):
    _of_doctr(_name, "detection", IMAGES, MORE_IMAGES)
for _name in ("crnn_mobilenet_v3_small", "sar_resnet31", "vitstr_small", "parseq"):
    _of_doctr(_name, "recognition", [(2, 128), (3, 128)], [(1, 128), (4, 128)])


@case([(1, 64), (2, 64)], [(1, 64), (3, 64)])
def image_encoder_of_segment_anything():
    from segment_anything.modeling import ImageEncoderViT

    model = ImageEncoderViT(
        img_size=64,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        out_chans=16,
        use_rel_pos=True,
        window_size=3,
        global_attn_indexes=(1,),
    )
    return model, lambda batch, side: model(images(batch, side))


@case([(2, 3), (1, 2)], [(1, 4), (3, 1)])
def prompts_of_segment_anything():
    from segment_anything.modeling import MaskDecoder, PromptEncoder, TwoWayTransformer

    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = PromptEncoder(16, image_embedding_size=(8, 8), input_image_size=(64, 64), mask_in_chans=4)
            transformer = TwoWayTransformer(2, 16, 2, 32)
            self.decoder = MaskDecoder(transformer_dim=16, transformer=transformer, num_multimask_outputs=3)

        def forward(self, image, points, labels):
            sparse, dense = self.encoder((points, labels), None, None)
            places = self.encoder.get_dense_pe()
            return self.decoder(image, places, sparse, dense, multimask_output=True)

    model = Prompted()

    def use(prompts, points):
        model(randn(1, 16, 8, 8), torch.rand(prompts, points, 2) * 64, torch.randint(0, 2, (prompts, points)))

    return model, use


@case(IMAGES, MORE_IMAGES)
def perceptual_distance():
    import lpips

    model = lpips.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False)
    return model, lambda batch, side: model(images(batch, side), images(batch, side))


def _of_vit_pytorch(path, **options):
    def make():
        module, name = path.split(".")
        model = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**options)
        return model, lambda batch, side: model(images(batch, side))

    CASES.append(Case(path, "vision transformers", make, SQUARES, MORE_SQUARES))


_SMALL = {"image_size": 32, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
for _path in (
    "vit.ViT",
    "simple_vit.SimpleViT",
    "deepvit.DeepViT",
    "parallel_vit.ViT",
    "rvt.RvT",
    "learnable_memory_vit.ViT",
):
    _of_vit_pytorch(_path, patch_size=8, **_SMALL)
_of_vit_pytorch("cait.CaiT", patch_size=8, cls_depth=1, **_SMALL)
_of_vit_pytorch("xcit.XCiT", patch_size=8, cls_depth=1, **_SMALL)
_of_vit_pytorch("t2t.T2TViT", t2t_layers=((7, 4), (3, 2)), **_SMALL)
_of_vit_pytorch("pit.PiT", patch_size=8, **{**_SMALL, "depth": (1, 1)})
_of_vit_pytorch("vit_with_patch_merger.ViT", patch_size=8, patch_merge_layer=1, patch_merge_num_tokens=4, **_SMALL)
_of_vit_pytorch("ats_vit.ViT", patch_size=8, max_tokens_per_depth=(8, 4), **_SMALL)
_of_vit_pytorch("cvt.CvT", num_classes=5)
_of_vit_pytorch("levit.LeViT", image_size=32, num_classes=5, stages=2, dim=(16, 32), depth=1, heads=(2, 2), mlp_mult=2)
_of_vit_pytorch("max_vit.MaxViT", num_classes=5, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1), window_size=4)
_of_vit_pytorch(
    "nest.NesT", image_size=32, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1), num_classes=5
)
_of_vit_pytorch(
    "regionvit.RegionViT", dim=(8, 16, 32, 64), depth=(1, 1, 1, 1), window_size=4, num_classes=5,
    tokenize_local_3_conv=False, use_peg=False,
)  # fmt: skip
