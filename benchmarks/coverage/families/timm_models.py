"""Image models of timm, with random weights; most at two image sizes."""

from cases import CASES, Case, images

IMAGES, MORE_IMAGES = [(2, 64), (3, 96)], [(1, 128), (2, 160)]
ROWS, MORE_ROWS = [(2, 64), (3, 64)], [(1, 64), (5, 64)]


def _add(name, recorded=IMAGES, truth=MORE_IMAGES, **options):
    def make():
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=5, **options)
        return model, lambda batch, side: model(images(batch, side))

    CASES.append(Case(name, "timm", make, recorded, truth))


# Convolutions: any size of image.
for _name in (
    "resnet10t",
    "mobilenetv3_small_050",
    "efficientnet_b0",
    "convnext_atto",
    "densenet121",
    "regnetx_002",
    "ghostnet_050",
    "hardcorenas_a",
    "edgenext_xx_small",
    "poolformer_s12",
    "repvgg_a0",
    "fastvit_t8",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "tf_efficientnetv2_b0",
    "dla34",
    "hrnet_w18_small",
    "inception_next_tiny",
    "mobileone_s0",
    "efficientvit_b0",
    "starnet_s1",
    "repghostnet_050",
    "lcnet_050",
    "selecsls42b",
    "nf_resnet26",
):
    _add(_name)

# Attention: one size of image, or positions that follow it.
for _name, _options in {
    "vit_tiny_patch16_224": {"depth": 2},
    "deit3_small_patch16_224": {"depth": 2},
    "eva02_tiny_patch14_224": {"depth": 2},
    "beit_base_patch16_224": {"depth": 2, "embed_dim": 64, "num_heads": 2},
    "mixer_s32_224": {},
    "levit_128s": {},
    "xcit_nano_12_p16_224": {"depth": 2},
    "coat_lite_tiny": {},
    "pvt_v2_b0": {},
}.items():
    _side = 70 if "patch14" in _name else 64
    _rows = [(batch, _side) for batch in (2, 3)], [(batch, _side) for batch in (1, 5)]
    _add(_name, *_rows, **({} if "pvt" in _name else {"img_size": _side}), **_options)


def _dynamic_vit():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=2, img_size=64, dynamic_img_size=True)
    return model, lambda batch, side: model(images(batch, side))


def _features():
    import timm

    model = timm.create_model("resnet10t", features_only=True)
    return model, lambda batch, side: model(images(batch, side))


def _swin():
    import timm

    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        num_classes=5,
        img_size=64,
        window_size=4,
        embed_dim=32,
        depths=(1, 2),
        num_heads=(2, 4),
    )
    return model, lambda batch, side: model(images(batch, side))


CASES.append(Case("vit with images of any size", "timm", _dynamic_vit, IMAGES, MORE_IMAGES))
CASES.append(Case("features of all levels", "timm", _features, IMAGES, MORE_IMAGES))
CASES.append(Case("swin", "timm", _swin, ROWS, MORE_ROWS))
