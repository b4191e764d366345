from . import data as data
from . import deploy as deploy
from . import errors as errors
from . import experiment as experiment
from . import labels as labels
from . import methods as methods
from . import models as models
from . import partition as partition
from .errors import FedskewError as FedskewError
from .experiment._result import Result as Result
from .experiment._simulate import simulate as simulate
from .experiment._trained import TrainedModel as TrainedModel
from .experiment._trained import load as load
from .labels import LabelCounts as LabelCounts
from .labels import describe as describe

__version__: str
