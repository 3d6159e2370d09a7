"""Classification, segmentation, detection, video: torchvision, segmentation-models-pytorch, kornia and open_clip."""

import torch
from cases import CASES, Case, case, images, ints, randn
from torch import nn

IMAGES, MORE_IMAGES = [(2, 64), (3, 96)], [(1, 128), (2, 160)]


def _add(family, name, make, recorded=IMAGES, truth=MORE_IMAGES):
    CASES.append(Case(name, family, make, recorded, truth))


def _torchvision(name, **options):
    def make():
        import torchvision

        model = torchvision.models.get_model(name, weights=None, **options)
        return model, lambda batch, side: model(images(batch, side))

    _add("torchvision", name, make)


for _name in (
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "mnasnet0_5",
    "mobilenet_v2",
    "convnext_tiny",
    "swin_t",
):
    _torchvision(_name, num_classes=5)
for _name in ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50"):
    _torchvision(_name, num_classes=5, weights_backbone=None)


def _segmentation(name, **options):
    def make():
        import segmentation_models_pytorch

        found = getattr(segmentation_models_pytorch, name)
        model = found("resnet18", encoder_weights=None, classes=3, **options)
        return model, lambda batch, side: model(images(batch, side))

    _add("segmentation models", name, make)


for _name in ("Unet", "UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3Plus", "Linknet", "MAnet", "UPerNet", "Segformer"):
    _segmentation(_name)


@case([(2, 8), (1, 12)], [(1, 10), (3, 16)])
def video_of_torchvision():
    import torchvision

    model = torchvision.models.video.r3d_18(weights=None, num_classes=5)
    return model, lambda batch, frames: model(randn(batch, 3, frames, 32, 32))


@case([(5,), (9,)], [(1,), (20,)])
def boxes_suppressed():
    import torchvision

    class Kept(nn.Module):
        def forward(self, boxes, scores):
            kept = torchvision.ops.nms(boxes, scores, 0.5)
            return boxes[kept], scores[kept]

    model = Kept()

    def use(count):
        corners = torch.rand(count, 2) * 4
        model(torch.cat([corners, corners + 3], 1), torch.rand(count))

    return model, use


@case([(2, 64), (3, 96)], [(1, 128), (2, 160)])
def detector_of_anchors():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 8, 3, 4, 1))
            self.boxes, self.classes = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 5, 1)

        def forward(self, image):
            features = self.body(image)
            height, width = features.shape[-2:]
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            centres = torch.stack([columns, rows], -1).reshape(1, -1, 2) + 0.5
            boxes = self.boxes(features).flatten(2).transpose(1, 2)
            corners = torch.cat([centres - boxes[..., :2].exp(), centres + boxes[..., 2:].exp()], -1) * 8
            scores, labels = self.classes(features).flatten(2).transpose(1, 2).sigmoid().max(-1)
            best = scores.topk(8, dim=1).indices
            return (
                corners.gather(1, best.unsqueeze(-1).expand(-1, -1, 4)),
                scores.gather(1, best),
                labels.gather(1, best),
            )

    model = Detector()
    return model, lambda batch, side: model(images(batch, side))


@case([(2, 64), (3, 96)], [(1, 128), (2, 160)])
def detector_with_a_threshold():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 5, 8, 8)

        def forward(self, image):
            found = self.body(image).flatten(2).transpose(1, 2)
            kept = found[..., 4].sigmoid() > 0.5
            return found[kept], kept.nonzero()[:, 0]

    model = Detector()
    return model, lambda batch, side: model(images(batch, side))


@case([(2, 5, 7), (3, 9, 4)], [(1, 6, 8), (4, 12, 11)])
def overlaps_and_losses_of_boxes():
    class Overlap(nn.Module):
        def forward(self, a, b):
            top, bottom = (
                torch.maximum(a[:, :, None, :2], b[:, None, :, :2]),
                torch.minimum(a[:, :, None, 2:], b[:, None, :, 2:]),
            )
            shared = (bottom - top).clamp(min=0).prod(-1)
            areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (a, b)]
            overlap = shared / (areas[0].unsqueeze(2) + areas[1].unsqueeze(1) - shared)
            return overlap.max(-1)

    model = Overlap()

    def boxes(batch, count):
        corners = torch.rand(batch, count, 2)
        return torch.cat([corners, corners + torch.rand(batch, count, 2) + 0.1], -1)

    return model, lambda batch, a, b: model(boxes(batch, a), boxes(batch, b))


@case([(2, 32), (3, 48)], [(1, 40), (2, 64)])
def u_net_with_padding():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
            self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            first = self.a(x).relu()
            up = self.up(self.b(nn.functional.max_pool2d(first, 2)).relu())
            rows, columns = first.shape[2] - up.shape[2], first.shape[3] - up.shape[3]
            return self.out(torch.cat([first, nn.functional.pad(up, (0, columns, 0, rows))], 1)).argmax(1)

    model = UNet()
    return model, lambda batch, side: model(images(batch, side, side + 1))


@case([(2, 32), (3, 48)], [(1, 40), (2, 64)])
def spatial_transformer():
    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.where = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 6))

        def forward(self, x):
            theta = self.where(x).view(-1, 2, 3) * 0.1 + torch.tensor([[1.0, 0, 0], [0, 1, 0]])
            grid = nn.functional.affine_grid(theta, x.shape, align_corners=False)
            return nn.functional.grid_sample(x, grid, align_corners=False)

    model = Transformer()
    return model, lambda batch, side: model(images(batch, side))


@case([(2, 16), (3, 24)], [(1, 20), (2, 32)])
def flow_by_correlation():
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 4, 3, 2, 1)

        def forward(self, a, b):
            a, b = self.body(a), self.body(b)
            height, width = a.shape[-2:]
            volume = (a.flatten(2).transpose(1, 2) @ b.flatten(2)).softmax(-1)
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            grid = torch.stack([columns, rows], -1).reshape(-1, 2).float()
            flow = (volume @ grid - grid).transpose(1, 2).reshape(-1, 2, height, width)
            return nn.functional.interpolate(flow, scale_factor=2, mode="bilinear", align_corners=True) * 2

    model = Flow()
    return model, lambda batch, side: model(images(batch, side), images(batch, side))


@case([(2, 32), (3, 48)], [(1, 40), (2, 64)])
def super_resolution():
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2)
    model = nn.Sequential(*layers)
    return model, lambda batch, side: model(images(batch, side))


@case([(4, 3), (6, 5)], [(3, 1), (9, 7)])
def images_and_texts():
    import open_clip.model

    vision = open_clip.model.CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=32)
    text = open_clip.model.CLIPTextCfg(context_length=12, vocab_size=99, width=32, heads=2, layers=1)
    model = open_clip.model.CLIP(16, vision, text)
    return model, lambda pictures, texts: model(images(pictures, 32), ints(texts, 12))


def _kornia(name, make, recorded=((2, 24), (3, 32)), truth=((1, 40), (2, 56))):
    class Filter(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, image):
            return self.function(image)

    def case_of():
        import kornia

        model = make(kornia)
        model = model if isinstance(model, nn.Module) else Filter(model)
        return model, lambda batch, side: model(torch.rand(batch, 3, side, side))

    _add("kornia", name, case_of, list(recorded), list(truth))


_kornia("blur", lambda kornia: kornia.filters.GaussianBlur2d((5, 5), (1.5, 1.5)))
_kornia("edges", lambda kornia: kornia.filters.Canny())
_kornia("sobel", lambda kornia: kornia.filters.Sobel())
_kornia("median", lambda kornia: kornia.filters.MedianBlur((3, 3)))
_kornia("bilateral", lambda kornia: lambda x: kornia.filters.bilateral_blur(x, (3, 3), 0.1, (1.5, 1.5)))
_kornia("hue", lambda kornia: lambda x: kornia.color.hsv_to_rgb(kornia.color.rgb_to_hsv(x)))
_kornia("lab", lambda kornia: kornia.color.RgbToLab())
_kornia("corners", lambda kornia: lambda x: kornia.feature.harris_response(kornia.color.rgb_to_grayscale(x)))
_kornia("similarity", lambda kornia: lambda x: kornia.metrics.ssim(x, x.flip(-1), 5))
_kornia("erosion", lambda kornia: lambda x: kornia.morphology.erosion(x, torch.ones(3, 3)))
_kornia("equalisation", lambda kornia: kornia.enhance.normalize_min_max)
_kornia("rotation", lambda kornia: lambda x: kornia.geometry.rotate(x, torch.full((x.shape[0],), 30.0)))
_kornia("resizing", lambda kornia: lambda x: kornia.geometry.resize(x, (16, 20), antialias=True))
_kornia("pyramid", lambda kornia: lambda x: kornia.geometry.build_pyramid(x, 3))


@case([(2, 24), (3, 32)], [(1, 40), (2, 56)])
def images_warped():
    import kornia

    class Warp(nn.Module):
        def forward(self, image, matrix):
            return kornia.geometry.warp_perspective(image, matrix, (20, 18))

    model = Warp()
    return model, lambda batch, side: model(torch.rand(batch, 3, side, side), torch.eye(3) + 0.01 * randn(batch, 3, 3))


@case([(5,), (8,)], [(1,), (20,)])
def descriptors_of_patches():
    import kornia

    model = kornia.feature.HardNet(pretrained=False)
    return model, lambda patches: model(torch.rand(patches, 1, 32, 32))


@case([(5,), (8,)], [(1,), (20,)])
def rotations_as_quaternions():
    import kornia

    class Rotations(nn.Module):
        def forward(self, angles, points):
            matrix = kornia.geometry.axis_angle_to_rotation_matrix(angles)
            return kornia.geometry.rotation_matrix_to_quaternion(matrix), points @ matrix

    model = Rotations()
    return model, lambda count: model(randn(count, 3), randn(count, 4, 3))
