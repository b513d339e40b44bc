"""The scheduler plugin's settings: `ferro.scheduler` in Dask's configuration, and the arguments of `ff.install`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dask_ferro import config
from dask_ferro.options import AUTO, OFF, PluginOptions
from dask_ferro.policy.placement import PlacementParameters
from dask_ferro.policy.scheduling_core import COALESCE, TICK, SchedulingSettings
from dask_ferro.policy.stealing.informed import StealingParameters

# The policy for "auto" where Dask's own stealing is on.
_POLICY = "informed"


@dataclass(frozen=True)
class Settings(PluginOptions):
    """The settings of the plugin: options, and the parameters of its policies; durations are seconds."""

    parameters: StealingParameters = field(default_factory=StealingParameters)
    placing: PlacementParameters = field(default_factory=PlacementParameters)
    coalesce: float = COALESCE
    tick: float = TICK

    @classmethod
    def configured(cls, **options: object) -> Settings:
        """Return the configuration's settings, with some of them given by name.

        Raises
        ------
        ConfigError
            For an unknown name, a value of the wrong kind, or a key of the configuration that is no option.
        """
        config.check()
        return config.read(cls, "scheduler.", options, "ff.install")

    @property
    def rules(self) -> SchedulingSettings:
        """The subset that a simulation follows."""
        return SchedulingSettings(self.parameters, self.placing, self.rank, self.coalesce, self.tick)

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
