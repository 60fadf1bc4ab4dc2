"""Make the dashboard of a Weights & Biases project: ``python scripts/wandb_dashboard.py --entity ME``.

Needs the package wandb-workspaces, and that you are logged in. Makes a new saved view each time, and prints its
address. What it shows: docs/wandb.md.
"""

import argparse
import sys
from typing import Any

NAME = "specbench"
COLUMNS = (
    "run:displayName",
    "run:state",
    "run:group",
    "config:facts.value.drafter.name",
    "config:k.value",
    "summary:speedup",
    "summary:speedup_ci95_low",
    "summary:speedup_ci95_high",
    "summary:tokens_per_pass",
    "summary:lossless/verdict",
    "summary:flags",
    "tags:__ALL__",
)
INTERVAL = ("speedup_ci95_low", "speedup_ci95_high")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entity", required=True, help="user or team that the project belongs to")
    parser.add_argument("--project", default="specbench")
    arguments = parser.parse_args()
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        sys.exit(f"wandb_dashboard: {error}; install it: pip install wandb-workspaces")
    made = dashboard(arguments.entity, arguments.project, workspaces, panels)
    try:
        print(made.save().url)
    except Exception as error:  # whatever the network, the server or the login has against it
        sys.exit(f"wandb_dashboard: the view could not be saved: {error}")


def dashboard(entity: str, project: str, ws: Any, wr: Any) -> Any:
    """The view, not saved yet. ``ws``, ``wr``: the modules workspaces and reports.v2 of wandb-workspaces."""

    def bars(title: str, *metrics: str) -> Any:
        return wr.BarPlot(title=title, metrics=list(metrics), orientation="h", max_runs_to_show=50)

    def points(title: str, x: Any, y: str, **other: Any) -> Any:
        return wr.ScatterPlot(title=title, x=x, y=wr.SummaryMetric(y), **other)

    def lines(title: str, x: str, *metrics: str) -> Any:
        return wr.LinePlot(title=title, x=x, y=list(metrics))

    sections = {
        "Speedup": [
            bars("speedup over plain decoding, with its 95 % interval", INTERVAL[0], "speedup", INTERVAL[1]),
            bars("speedup: measured, predicted, bound", "speedup", "model/predicted_speedup", "model/bound"),
            points("speedup against draft length", wr.Config("k"), "speedup"),
            points("measured against predicted speedup", wr.SummaryMetric("model/predicted_speedup"), "speedup"),
        ],
        "Acceptance": [
            bars("tokens per verify pass", "tokens_per_pass"),
            bars("acceptance rate", "acceptance_rate"),
            wr.WeavePanelSummaryTable(table_name="acceptance_by_position"),
            wr.WeavePanelSummaryTable(table_name="accepted_length_histogram"),
        ],
        "Where the time goes": [
            bars(
                "shares of a round", *(f"model/shares/{part}" for part in ("draft", "verify", "accept", "bookkeeping"))
            ),
            bars("seconds of a round: the method's, plain decoding's", "round_seconds", "baseline_round_seconds"),
        ],
        "Doubts": [
            bars("clock spread: 1 is a steady machine", "clock_spread"),
            bars("share of the processor that others took", "machine_load/others", "machine_load/stolen"),
            wr.WeavePanelSummaryTable(table_name="by_category"),
        ],
        "Live": [
            lines("replies", "live/seconds", "live/replies", "live/replies_of"),
            lines("tokens/s of the moment", "live/seconds", "live/tokens_per_s", "live/baseline_tokens_per_s"),
            lines("tokens per verify pass so far", "live/seconds", "live/tokens_per_pass"),
        ],
        "Training": [
            lines("loss", "Step", "loss", "validation_loss"),
            lines("tokens per verify pass on held-out replies", "Step", "tokens_per_pass"),
        ],
    }
    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            ws.Section(name=name, panels=found, is_open=name in ("Speedup", "Acceptance"))
            for name, found in sections.items()
        ],
        # runs are not grouped: bars of a group are means over its drafters, which say nothing
        runset_settings=ws.RunsetSettings(pinned_columns=list(COLUMNS)),
    )


if __name__ == "__main__":
    main()
