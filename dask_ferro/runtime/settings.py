"""The scheduler plugin's settings: `ferro.scheduler` of Dask's configuration, and what `ff.install` was told."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.policy.place import Placement
from dask_ferro.policy.policies import POLICIES as NAMED
from dask_ferro.policy.steal import Parameters
from dask_ferro.simulate.rules import Rules

AUTO, OFF = "auto", "none"
POLICIES = (AUTO, *NAMED)
# What "auto" is where Dask's own stealing is on.
_POLICY = "informed"


@dataclass(frozen=True)
class Settings:
    """What the plugin does, and when; durations are seconds.  The keys stand in `ferro.yaml` with their reasons.

    Attributes
    ----------
    stealing : str
        "informed", "last-victim" or "none"; "auto": as `resolved` says.
    placement, rank : bool
    parameters : Parameters
        Of the stealing policy.
    placing : Placement
    coalesce, tick, scheduler_sends, worker_sends, client_sends, events, answer : float
    recorded_tasks : int
    """

    stealing: str = AUTO
    placement: bool = True
    rank: bool = True
    parameters: Parameters = field(default_factory=Parameters)
    placing: Placement = field(default_factory=Placement)
    coalesce: float = 0.001
    tick: float = 0.5
    scheduler_sends: float = 0.001
    worker_sends: float = 0.001
    client_sends: float = 0.002
    events: float = 5.0
    answer: float = 15.0
    recorded_tasks: int = 0

    @classmethod
    def configured(cls, **options: Any) -> Settings:
        """Return the configuration's settings, with some of them given by name.

        Raises
        ------
        ConfigError
            A name that is none, or a value of the wrong kind.
        """
        own = {f.name for f in fields(cls)} - {"parameters", "placing"}
        steal = {f.name for f in fields(Parameters)}
        unknown = sorted(set(options) - own - steal)
        if unknown:
            raise ConfigError(
                f"ff.install: unknown {', '.join(unknown)}; wanted some of {', '.join(sorted(own | steal))}"
            )
        options = _in_words(options)
        seconds = config.seconds
        parameters = Parameters(
            threshold=seconds("scheduler.threshold"),
            threshold_least=seconds("scheduler.threshold-least"),
            threshold_most=seconds("scheduler.threshold-most"),
            chunk=config.number("scheduler.chunk", 0.0, 1.0),
            reach=seconds("scheduler.reach"),
            margin=seconds("scheduler.margin"),
            transfer_margin=config.number("scheduler.transfer-margin"),
            shortest=seconds("scheduler.shortest"),
            spare=seconds("scheduler.spare"),
        )
        parameters = replace(parameters, **{k: v for k, v in options.items() if k in steal})
        settings = cls(
            stealing=config.choice("scheduler.stealing", POLICIES, off=OFF),
            placement=config.flag("scheduler.placement"),
            rank=config.flag("scheduler.rank"),
            parameters=parameters,
            placing=Placement(spare=parameters.spare),
            coalesce=seconds("scheduler.coalesce"),
            tick=seconds("scheduler.tick"),
            scheduler_sends=seconds("scheduler.scheduler-sends"),
            worker_sends=seconds("scheduler.worker-sends"),
            client_sends=seconds("scheduler.client-sends"),
            events=seconds("scheduler.events", off=True),
            answer=seconds("scheduler.answer"),
            recorded_tasks=int(config.number("scheduler.recorded-tasks")),
        )
        settings = replace(settings, **{k: v for k, v in options.items() if k in own})
        settings._check()
        return settings

    @property
    def rules(self) -> Rules:
        """What of it a simulation follows."""
        names = ("rank", "coalesce", "tick", "scheduler_sends", "worker_sends")
        return Rules(self.parameters, self.placing, **{name: getattr(self, name) for name in names})

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

    def _check(self) -> None:
        """Refuse values of the wrong kind before they reach a scheduler."""
        p = self.parameters
        durations = (
            "threshold",
            "threshold_least",
            "threshold_most",
            "reach",
            "margin",
            "shortest",
            "bears",
            "patience",
            "spare",
        )
        numbers = {name: getattr(p, name) for name in durations} | {"transfer_margin": p.transfer_margin}
        numbers |= {
            n: getattr(self, n)
            for n in ("coalesce", "scheduler_sends", "worker_sends", "client_sends", "events", "answer")
        }
        wrong = {name: value for name, value in numbers.items() if not _is_number(value) or value < 0}
        if not _is_number(p.chunk) or not 0 <= p.chunk <= 1:
            wrong["chunk"] = p.chunk
        if not _is_number(self.tick) or self.tick <= 0:
            wrong["tick"] = self.tick
        wrong |= {
            n: getattr(self, n) for n in ("placement", "rank") if not isinstance(getattr(self, n), bool)
        }
        if wrong:
            told = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
            raise ConfigError(
                f"dask_ferro's scheduler settings: got {told}; wanted seconds of at least 0 (tick: more), a chunk"
                " from 0 to 1, and placement and rank true or false"
            )


def _in_words(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `ff.install` with every spelling of on and off understood, as in the configuration."""
    found = dict(options)
    if "stealing" in options:
        policy = config.as_choice(options["stealing"], POLICIES, off=OFF)
        if policy is None:
            raise ConfigError(
                f"ff.install: stealing={options['stealing']!r}, wanted one of {', '.join(POLICIES)}"
            )
        found["stealing"] = policy
    for name in ("placement", "rank"):
        if name in options and (flag := config.as_flag(options[name])) is not None:
            found[name] = flag
    if "events" in options and config.as_flag(options["events"]) is False:
        found["events"] = 0.0
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
