from .clip import ClipAction as ClipAction
from .clip import UnsquashAction as UnsquashAction
from .clip import clip_rewards as clip_rewards
from .connector import Connector as Connector
from .flatten import Flatten as Flatten
from .flatten import OneHot as OneHot
from .frame_stack import FrameStack as FrameStack
from .mean_std import MeanStdFilter as MeanStdFilter
