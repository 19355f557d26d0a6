# SPDX-License-Identifier: Apache-2.0
"""Lightning loggers of trackers: Lightning's own, and those that it lacks.

A logger is opened, logs and is closed in one thread. `open_logger` may raise whatever its tracker
raises: no network, no key, no server.
"""

import logging
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

PROJECT = "longhaul"
"""Project or experiment unless the tracker's own variable names one."""
EXPORT_SECONDS = 10.0


class TrackedLogger:
    """A logger that is open, and how it is closed."""

    def __init__(
        self,
        logger: Logger,
        *,
        close: Callable[[], None],
        run_id: str = "",
        rename: Callable[[str], str] = str,
    ) -> None:
        """Take the logger, the id by which a resumed run continues, and how names are spelled."""
        self.logger, self.close, self.run_id, self.rename = logger, close, run_id, rename

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step."""
        named = {self.rename(name): value for name, value in metrics.items()}
        self.logger.log_metrics(named, step)


def open_logger(
    name: str,
    trainer: Trainer,
    folder: Path,
    *,
    run_id: str,
    run_name: str,
    config: Mapping[str, Any],
) -> TrackedLogger:
    """Return the open logger of a tracker; `run_id` is that of an earlier attempt, or empty."""
    if name == "tensorboard":
        return _tensorboard(trainer, folder)
    if name == "wandb":
        return _wandb(folder, run_id, run_name, config)
    if name == "mlflow":
        return _mlflow(folder, run_id, run_name, config)
    logger = TrackioLogger(run_name, config) if name == "trackio" else OtelLogger(run_name, config)
    rename = plain if name == "otel" else str
    return TrackedLogger(logger, close=logger.close, run_id=run_name, rename=rename)


def plain(name: str) -> str:
    """Return a name without the characters that MLflow and OpenTelemetry refuse."""
    name = name.replace("(%)", "_percent").replace("+", "_up")
    return re.sub(r"[^a-zA-Z0-9_/. -]+", "_", name.replace(")", ""))


def _tensorboard(trainer: Trainer, folder: Path) -> TrackedLogger:
    """Return the recipe's TensorBoard logger, which Lightning closes."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            return TrackedLogger(logger, close=lambda: None)
    logger = TensorBoardLogger(save_dir=str(folder), name="tensorboard", version="events")
    return TrackedLogger(logger, close=lambda: logger.finalize("success"))


def _wandb(folder: Path, run_id: str, run_name: str, config: Mapping[str, Any]) -> TrackedLogger:
    import wandb

    offline = os.environ.get("WANDB_MODE", "") in ("offline", "dryrun", "disabled")
    if not offline and not wandb.api.api_key:
        raise RuntimeError("no API key is configured")  # it would ask for one on a terminal
    run_id = run_id or uuid.uuid4().hex[:8]
    logger = WandbLogger(
        name=os.environ.get("WANDB_NAME", run_name),
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        save_dir=os.environ.get("WANDB_DIR", str(folder)),
        id=run_id,
        config=dict(config),
    )
    experiment = logger.experiment
    return TrackedLogger(logger, close=experiment.finish, run_id=run_id)


def _mlflow(folder: Path, run_id: str, run_name: str, config: Mapping[str, Any]) -> TrackedLogger:
    # MLflow retries for minutes by default, and the run would end meanwhile.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(EXPORT_SECONDS)))
    # Without a server runs are files, which mlflow-skinny can write and MLflow 3 asks to confirm.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
        run_name=os.environ.get("MLFLOW_RUN_NAME", run_name),
        tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"),
        save_dir=str(folder / "mlruns"),
        run_id=run_id or None,
    )
    opened = str(logger.run_id)
    if run_id:
        logger.experiment.update_run(opened, status="RUNNING")
    else:
        logger.log_hyperparams(dict(config))
    return TrackedLogger(logger, close=logger.finalize, run_id=opened, rename=plain)


class TrackioLogger(Logger):
    """Trackio: a local database, or a Space that TRACKIO_SPACE_ID names."""

    def __init__(self, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the run of a name, or continue it; raise OSError if its folder takes no file."""
        import trackio

        if not os.environ.get("TRACKIO_SPACE_ID"):
            from trackio.utils import TRACKIO_DIR

            TRACKIO_DIR.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=TRACKIO_DIR):
                pass
        self._name = run_name
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run_name,
            resume="allow",
            config=dict(config),
            embed=False,
        )

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._name

    @property
    def version(self) -> str:
        """The same: Trackio continues a run by its name."""
        return self._name

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the numbers of a step; raise OSError once Trackio's own thread could not write."""
        writer = getattr(self._run, "_local_sender_thread", None)
        if writer is not None and not writer.is_alive():
            raise OSError("it could not write the steps before; the log has its error")
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run was opened with its configuration."""

    def close(self) -> None:
        """Wait until everything is written."""
        self._run.finish()


class OtelLogger(Logger):
    """OpenTelemetry: gauges by OTLP over HTTP, to the address that OTEL's variables state."""

    def __init__(self, run_name: str, config: Mapping[str, Any]) -> None:
        """Open an exporter whose resource has the run's name and configuration."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
        from opentelemetry.sdk.resources import Resource

        self._name, self._success = run_name, MetricExportResult.SUCCESS
        # The callback says once what the exporter would say at each try.
        logging.getLogger(OTLPMetricExporter.__module__).setLevel(logging.CRITICAL)
        flat = {f"longhaul.{key}": value for key, value in config.items() if _is_attribute(value)}
        resource = Resource.create({"service.name": PROJECT, "longhaul.run": run_name, **flat})
        self._exporter = OTLPMetricExporter()
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider(metric_readers=[self._reader], resource=resource)
        self._meter = self._provider.get_meter(PROJECT)
        self._gauges: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._name

    @property
    def version(self) -> str:
        """The same: a resource is known by its attributes."""
        return self._name

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Export the numbers of a step; raise ConnectionError if they do not arrive."""
        for name, value in {"step": float(step or 0), **metrics}.items():
            named = f"{PROJECT}.{name.replace('/', '.')}"
            if named not in self._gauges:
                self._gauges[named] = self._meter.create_gauge(named)
            self._gauges[named].set(value)
        data = self._reader.get_metrics_data()
        assert data is not None  # a gauge has just been set
        done = self._exporter.export(data, timeout_millis=EXPORT_SECONDS * 1000)
        if done is not self._success:
            raise ConnectionError("the collector has not taken the metrics of a step")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the resource has the configuration."""

    def close(self) -> None:
        """Close the connection."""
        self._provider.shutdown()
        self._exporter.shutdown()


def _is_attribute(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)
