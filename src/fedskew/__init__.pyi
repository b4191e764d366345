from . import errors as errors
from . import labels as labels
from .errors import FedskewError as FedskewError
from .experiment import Result as Result
from .experiment import TrainedModel as TrainedModel
from .experiment import load as load
from .experiment import simulate as simulate
from .labels import LabelCounts as LabelCounts
from .labels import describe as describe
from .methods import Method as Method

__version__: str
