"""A client of Flower's own FedAvg: an epoch of SGD on its part of the digits."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for an epoch."""
    digits = load_digits()
    part = slice(int(context.node_config["client"]), None, int(context.node_config["clients"]))
    data = TensorDataset(
        torch.tensor(digits.data[part], dtype=torch.float32) / 16, torch.tensor(digits.target[part])
    )
    model = nn.Sequential(
        nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10)
    )
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), 0.0
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses += loss.item() * len(x)
    metrics = MetricRecord({"train_loss": losses / len(data), "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
