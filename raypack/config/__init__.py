"""One tree of frozen settings: models, machines and runs, from presets, TOML files and flags."""

from raypack.config.cluster import ClusterConfig
from raypack.config.model import ModelConfig
from raypack.config.presets import build, load_cluster, load_model, preset_names, preset_or_file, read_toml
from raypack.config.settings import first_fault
from raypack.config.tree import (
    Config,
    DataSection,
    ObserveSection,
    PlanSection,
    RunSection,
    TimeoutSection,
    TopologySection,
    TrainSection,
    evenly,
)
from raypack.config.units import Section

__all__ = [
    "ClusterConfig",
    "Config",
    "DataSection",
    "ModelConfig",
    "ObserveSection",
    "PlanSection",
    "RunSection",
    "Section",
    "TimeoutSection",
    "TopologySection",
    "TrainSection",
    "build",
    "evenly",
    "first_fault",
    "load_cluster",
    "load_model",
    "preset_names",
    "preset_or_file",
    "read_toml",
]
