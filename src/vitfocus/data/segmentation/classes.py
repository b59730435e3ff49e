"""What the classes of the segmentation data sets are called, and the colours they are usually shown in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IGNORE = 255  # the label of pixels that do not count

CITYSCAPES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
#: Cityscapes' own id of each of the 19 classes that are trained on; every other id is ignored.
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_CITYSCAPES_COLOURS = (
    *((128, 64, 128), (244, 35, 232), (70, 70, 70), (102, 102, 156), (190, 153, 153), (153, 153, 153)),
    *((250, 170, 30), (220, 220, 0), (107, 142, 35), (152, 251, 152), (70, 130, 180), (220, 20, 60), (255, 0, 0)),
    *((0, 0, 142), (0, 0, 70), (0, 60, 100), (0, 80, 100), (0, 0, 230), (119, 11, 32)),
)
CAMVID = (
    *("sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian"),
    "bicyclist",
)
_CAMVID_COLOURS = (
    *((128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0)),
    *((192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192)),
)
ADE20K = tuple(
    """wall;building;sky;floor;tree;ceiling;road;bed;windowpane;grass;cabinet;sidewalk;person;earth;door;table;mountain;
plant;curtain;chair;car;water;painting;sofa;shelf;house;sea;mirror;rug;field;armchair;seat;fence;desk;rock;wardrobe;
lamp;bathtub;railing;cushion;base;box;column;signboard;chest of drawers;counter;sand;sink;skyscraper;fireplace;
refrigerator;grandstand;path;stairs;runway;case;pool table;pillow;screen door;stairway;river;bridge;bookcase;blind;
coffee table;toilet;flower;book;hill;bench;countertop;stove;palm;kitchen island;computer;swivel chair;boat;bar;
arcade machine;hovel;bus;towel;light;truck;tower;chandelier;awning;streetlight;booth;television receiver;airplane;
dirt track;apparel;pole;land;bannister;escalator;ottoman;bottle;buffet;poster;stage;van;ship;fountain;conveyer belt;
canopy;washer;plaything;swimming pool;stool;barrel;basket;waterfall;tent;bag;minibike;cradle;oven;ball;food;step;tank;
trade name;microwave;pot;animal;bicycle;lake;dishwasher;screen;blanket;sculpture;hood;sconce;vase;traffic light;tray;
ashcan;fan;pier;crt screen;plate;monitor;bulletin board;shower;radiator;glass;clock;flag""".replace("\n", "").split(";")
)


def palette(classes: int, source: str = "") -> npt.NDArray[np.uint8]:
    """A colour for each class, (256, 3): the data set's own where it has some; ignored pixels are black.

    >>> palette(19, "cityscapes")[0].tolist(), palette(3)[:3].tolist()
    ([128, 64, 128], [[128, 0, 0], [0, 128, 0], [128, 128, 0]])
    """
    own = {"cityscapes": _CITYSCAPES_COLOURS, "acdc": _CITYSCAPES_COLOURS, "camvid": _CAMVID_COLOURS}.get(source)
    colours = np.array([_spread(number + 1) for number in range(256)], np.uint8)
    if own is not None and len(own) == classes:
        colours[:classes] = own
    colours[IGNORE] = 0
    return colours


def _spread(number: int) -> list[int]:
    """A colour that is unlike those of the numbers before: the number's bits, dealt to the channels' highest bits."""
    channels = [0, 0, 0]
    for place in range(8):
        for channel in range(3):
            channels[channel] |= ((number >> (3 * place + channel)) & 1) << (7 - place)
    return channels
