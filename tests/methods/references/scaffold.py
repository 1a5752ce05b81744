"""SCAFFOLD: Karimireddy et al. (2020), Algorithm 1, with server rate 1 and plain SGD."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.methods.references.training import State, batches, load, with_data


def scaffold(
    module: Any, data: Any, cohorts: list[Any], option: str, lr: float, epochs: int = 1
) -> tuple[State, State, list[State]]:
    """The model, c and all c_k after the given cohorts' rounds."""
    x = {n: p.detach().clone() for n, p in module.named_parameters()}
    c = {n: torch.zeros_like(p) for n, p in x.items()}
    client_state = [dict(c) for _ in range(data.num_clients)]
    for t, cohort in enumerate(cohorts):
        sent, changes = [], []
        for k in (k for k in with_data(data) if k in cohort.tolist()):
            net, steps = load(module, x), 0
            for inputs, target in batches(data, k, t, epochs):
                loss = F.cross_entropy(net(inputs), target)
                grads = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for (n, p), g in zip(net.named_parameters(), grads, strict=True):
                        p -= lr * (g - client_state[k][n] + c[n])
                steps += 1
            y = {n: p.detach() for n, p in net.named_parameters()}
            if option == "I":  # the gradient of the mean loss over all samples, at x
                inputs, target = (field[data.indices[k]] for field in data.fields)
                net = load(module, x)
                loss = F.cross_entropy(net(inputs), target)
                grads = torch.autograd.grad(loss, list(net.parameters()))
                new = {n: g for (n, _), g in zip(net.named_parameters(), grads, strict=True)}
            else:
                new = {n: client_state[k][n] - c[n] + (x[n] - y[n]) / (steps * lr) for n in x}
            changes.append({n: new[n] - client_state[k][n] for n in x})
            sent.append({n: y[n] - x[n] for n in x})
            client_state[k] = new
        x = {n: x[n] + torch.stack([d[n] for d in sent]).mean(0) for n in x}
        everybody = len(with_data(data))
        c = {n: c[n] + torch.stack([d[n] for d in changes]).sum(0) / everybody for n in x}
    return x, c, client_state
