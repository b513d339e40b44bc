"""A machine's costs are those with which the simulated probes take as long as the measured ones."""

import pytest
from simulated.calibration import Calibration, calibrate, probes
from simulated.contenders import simulate

from dask_ferro.simulate.cluster import VirtualCluster


def test_two_probes_give_the_costs_of_a_machine():
    cluster = VirtualCluster.local(3, cores=2)
    machine = Calibration(pace=0.5, late=0.001).of(cluster)
    measured = {
        name: simulate(graph, machine, policy="stock", known={"no-op": 0.0, "floor": 0.02}).counts["elapsed"]
        for name, graph in probes(3).items()
    }
    calibration = calibrate(cluster, measured)
    assert calibration.pace == pytest.approx(0.5, rel=0.1)
    assert calibration.late == pytest.approx(0.001, abs=0.0005)


def test_a_slower_machine_has_higher_costs_of_the_processor_and_the_same_links():
    cluster = VirtualCluster.local(2, cores=2)
    slower = Calibration(pace=2.0, late=0.002).of(cluster)
    assert slower.per_batch == 2 * cluster.per_batch
    assert (slower.wire, slower.same_host, slower.late) == (cluster.wire, cluster.same_host, 0.002)
