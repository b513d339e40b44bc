"""The scheduler plugin's settings: `ferro.scheduler` of Dask's configuration, and what `ff.install` was told."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dask_ferro import config
from dask_ferro.sections import AUTO, OFF, POLICIES, PluginOptions
from dask_ferro.simulate.core_adapter import SimulatedSettings

__all__ = ["AUTO", "OFF", "POLICIES", "Settings"]

# What "auto" is where Dask's own stealing is on.
_POLICY = "informed"


@dataclass(frozen=True)
class Settings(PluginOptions):
    """What the plugin does, and when; durations are seconds."""

    @classmethod
    def configured(cls, **options: object) -> Settings:
        """Return the configuration's settings, with some of them given by name.

        Raises
        ------
        ConfigError
            A name that is none, or a value of the wrong kind; a key of the configuration that no option has.
        """
        config.check()
        config.refuse_unknown("ff.install", options, sorted(config.names_of(cls)))
        found = config.read(cls, "scheduler.", options, "ff.install")
        return replace(found, placing=replace(found.placing, spare=found.parameters.spare))

    @property
    def rules(self) -> SimulatedSettings:
        """What of it a simulation follows."""
        names = ("rank", "coalesce", "tick", "scheduler_sends", "worker_sends")
        return SimulatedSettings(
            self.parameters, self.placing, self.learning, **{name: getattr(self, name) for name in names}
        )

    def resolved(self, stock: bool) -> Settings:
        """Return the settings with "auto" decided, and placement told whether anything is stolen.

        Parameters
        ----------
        stock : bool
            Whether the scheduler has Dask's own stealing, which `distributed.scheduler.work-stealing` switches off.
            Then nothing is stolen, unless a policy was asked for by its name.
        """
        policy = self.stealing if self.stealing != AUTO else _POLICY if stock else OFF
        return replace(self, stealing=policy, placing=replace(self.placing, steals=policy != OFF))
