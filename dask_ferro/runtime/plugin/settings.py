"""The scheduler plugin's settings: `ferro.scheduler` in Dask's configuration, and the arguments of `ff.install`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dask_ferro import config
from dask_ferro.policy.scheduling_core import SchedulingSettings
from dask_ferro.sections import AUTO, OFF, POLICIES, PluginOptions

__all__ = ["AUTO", "OFF", "POLICIES", "Settings"]

# The policy for "auto" where Dask's own stealing is on.
_POLICY = "informed"


@dataclass(frozen=True)
class Settings(PluginOptions):
    """The settings of the plugin; durations are seconds."""

    @classmethod
    def configured(cls, **options: object) -> Settings:
        """Return the configuration's settings, with some of them given by name.

        Raises
        ------
        ConfigError
            For an unknown name, a value of the wrong kind, or a key of the configuration that is no option.
        """
        config.check()
        config.refuse_unknown("ff.install", options, sorted(config.names_of(cls)))
        found = config.read(cls, "scheduler.", options, "ff.install")
        return replace(found, placing=replace(found.placing, spare=found.parameters.spare))

    @property
    def rules(self) -> SchedulingSettings:
        """The subset that a simulation follows."""
        names = ("rank", "coalesce", "tick", "scheduler_sends", "worker_sends")
        return SchedulingSettings(
            self.parameters, self.placing, self.learning, **{name: getattr(self, name) for name in names}
        )

    def resolved(self, stock: bool) -> Settings:
        """Return the settings with "auto" resolved, and placement told whether tasks are stolen.

        Parameters
        ----------
        stock : bool
            Whether the scheduler has Dask's own stealing, which `distributed.scheduler.work-stealing` switches off.
            Without it nothing is stolen, unless a policy was requested by name.
        """
        policy = self.stealing if self.stealing != AUTO else _POLICY if stock else OFF
        return replace(self, stealing=policy, placing=replace(self.placing, steals=policy != OFF))
