"""What is imported when: who looks at label counts does not wait for PyTorch, and who trains not for what draws."""

import subprocess
import sys

import pytest

pytest.importorskip("flwr")

from tests.deploy.federated import federate, tree

TRAIN_AT_A_SITE = """
from pathlib import Path
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fedskew import methods
from fedskew.deploy import Agreement, site_app
from fedskew.experiment import make_network, read
from fedskew.models import FlatModel
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
folder, data = Path(sys.argv[1]), sys.argv[2]
config, agreement = read(folder / "run.toml"), Agreement.read(folder / "deploy.toml")
model = FlatModel(make_network(config, 0, methods.build(config.method), 10, tuple(agreement.shape)))
arrays = ArrayRecord({name: Array(tensor.detach().numpy()) for name, tensor in model.state_dict().items()})
asked = {"fedskew-run": "0a", "server-round": 1, "fedskew-client": 0, "fedskew-epochs": 1, "fedskew-counted": 0}
message = Message(RecordDict({"arrays": arrays, "config": ConfigRecord(asked)}), 5, "train")
reply = site_app(folder)(message, Context(1, 5, {"data": data}, RecordDict(), {}))
assert reply.has_content()
"""
STEPS = {
    "import fedskew.labels, fedskew.weighting": {"torch", "matplotlib", "scipy", "sklearn", "opendp"},
    "import fedskew.cli": {"torch", "matplotlib", "scipy", "sklearn", "flwr"},
    "from fedskew.deploy import run_supernode": {"torch"},
    "import fedskew.methods.catalogue": {"fedskew.engine", "fedskew.experiment", "matplotlib", "sklearn", "jinja2"},
    TRAIN_AT_A_SITE: {"matplotlib", "sklearn", "scipy", "pandas", "jinja2", "opendp", "mlflow", "wandb"},
    "import fedskew; fedskew.simulate": {"tensorboard", "mlflow", "wandb", "matplotlib", "sklearn"},
    "fedskew.data.load('digits'); from fedskew.papers import estimate": {"matplotlib", "sklearn"},
    "fedskew.models.build('fasttext', 4, (9,), vocabulary=50)": {"torch._dynamo"},
    "fedskew.simulate(data='digits', partition={'rule': 'iid', 'clients': 2}, model='mlp3', method='moon',"
    " training={'rounds': 1}, engine={'backend': 'sequential'})": {"sympy", "matplotlib", "sklearn"},
}
"""One after another in one process, as a SuperNode and a site do, too; and what is still not there after each."""


@pytest.mark.slow
def test_what_is_heavy_is_imported_when_it_is_used(tmp_path):
    site = federate(tmp_path, tree("fedvls"))
    lines = ["import sys", *(f"{step}\nprint(sorted({late} & set(sys.modules)))" for step, late in STEPS.items())]
    command = [sys.executable, "-c", "\n".join(lines), str(site.app), str(site.data_of("ash"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == ["[]"] * len(STEPS)
