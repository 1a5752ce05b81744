"""The server of Flower's own FedAvg; writes the time at which each round ends."""

import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg."""
    times = Path(str(context.run_config["times"]))

    def after(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        with times.open("a") as file:
            file.write(f"{time.time()}\n")
        return None

    model = nn.Sequential(
        nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10)
    )
    FedAvg(fraction_evaluate=0.0).start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=after,
    )
