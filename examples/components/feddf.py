"""FedDF: the next model learns, on samples of the server, what the clients' models say together.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020. The clients' logits,
f(w_k, x), are averaged, and the next model, which begins as the mean of theirs, takes steps of Adam down

    mean over x of KL( softmax(mean over k of f(w_k, x)) || softmax(f(w, x)) )

The samples are those of `data.validation`, without their labels. The paper anneals Adam's rate, draws batches and stops
by validation; here each step takes all samples at one rate. Batch norm has the mean of the clients' statistics in all
models. In a config:

    [data]
    validation = 0.1
    [method]
    server_update.name = "feddf:FedDF"
"""

import torch

from fedskew.hooks import Hooks
from fedskew.parameters import Count, Positive, component
from fedskew.server_updates import Plain


@component
class FedDF(Plain, Hooks):
    """Sees `network`, with the next model, and `samples`, which the server holds itself."""

    steps: Count = 50
    rate: Positive = 0.001

    def next_model(self, end, network, samples, log):
        x = samples.inputs.index_select(0, torch.arange(len(samples.targets), device=samples.targets.device))
        network.network.eval()
        with torch.no_grad():
            total = 0.0
            for change in end.changes:
                network.write(end.old + change)
                total = total + network.outputs(x).logits
            taught = (total / len(end.changes)).softmax(1)

        def divergence(outputs):
            return torch.nn.functional.kl_div(outputs.logits.log_softmax(1), taught, reduction="batchmean")

        student = end.new.clone().requires_grad_()
        adam = torch.optim.Adam([student], lr=self.rate)
        for _ in range(self.steps):
            network.write(student.detach())
            value, _ = network.differentiate(x, divergence)
            student.grad = network.gradient.clone()
            adam.step()
        log("divergence from the ensemble", value)
        return student.detach()
