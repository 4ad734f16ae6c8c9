"""Labels of Ray nodes from a topology: what is known of the host, and only what Ray takes."""

from __future__ import annotations

import pytest

from wsync.errors import ConfigError
from wsync.integrations.placement import labels_option, node_labels
from wsync.topology import Device, Domain, DomainKind, Host, Nic, NicKind, Topology

CLIQUE = "3143b15b-c2cd-192b-28cc-9b5473fb5b93.32766"


def tray(*, off: tuple[str, ...] = (), kind: DomainKind = DomainKind.NVLINK, clique: str = CLIQUE) -> Topology:
    devices = tuple(Device(device_id=f"{h}/gpu{i}", host_id=h) for h in ("a", "b") for i in range(2))
    nics = tuple(Nic(nic_id=f"a/mlx5_{i}", host_id="a", kind=NicKind.INFINIBAND, rail=i) for i in range(4))
    members = tuple(d.device_id for d in devices if d.device_id not in off)
    return Topology(
        hosts=(Host(host_id="a"), Host(host_id="b"), Host(host_id="c")),
        devices=devices,
        nics=(*nics, Nic(nic_id="b/mlx5_0", host_id="b", rail=2), Nic(nic_id="b/eno1", host_id="b")),
        domains=(
            Domain(domain_id=clique, kind=kind, members=members),
            Domain(domain_id="rack7", kind=DomainKind.RACK, members=("a", "b")),
        ),
    )


def test_a_host_has_its_rack_its_domain_and_its_rails() -> None:
    labels = node_labels(tray(), "a")
    assert labels == {
        "wsync.io/host": "a",
        "wsync.io/rack": "rack7",
        "wsync.io/domain": CLIQUE,
        "ray.io/gpu-domain": CLIQUE,
        "wsync.io/rail": "0-3",
    }
    assert labels_option(labels) == (
        f"ray.io/gpu-domain={CLIQUE},wsync.io/domain={CLIQUE},wsync.io/host=a,wsync.io/rack=rack7,wsync.io/rail=0-3"
    )


def test_one_rail_is_a_number_and_what_is_not_known_has_no_label() -> None:
    assert node_labels(tray(), "b")["wsync.io/rail"] == "2"
    assert node_labels(tray(), "c") == {"wsync.io/host": "c"}


def test_a_host_with_a_device_off_the_domain_is_not_in_it() -> None:
    labels = node_labels(tray(off=("b/gpu1",)), "b")
    assert "ray.io/gpu-domain" not in labels
    assert "wsync.io/domain" not in labels
    assert node_labels(tray(off=("b/gpu1",)), "a")["ray.io/gpu-domain"] == CLIQUE


def test_a_domain_inside_of_a_host_has_a_dot_in_its_label() -> None:
    assert node_labels(tray(clique="a/nvlink0"), "a")["ray.io/gpu-domain"] == "a.nvlink0"


def test_the_label_of_gpus_is_for_nvlink_alone() -> None:
    labels = node_labels(tray(kind=DomainKind.XGMI), "a")
    assert labels["wsync.io/domain"] == CLIQUE
    assert "ray.io/gpu-domain" not in labels


@pytest.mark.parametrize("clique", ["a b", "x" * 64, "/nvlink0", "-a", "a,b=c"])
def test_a_name_that_is_no_value_of_a_label_is_refused(clique: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the value of a Ray label"):
        node_labels(tray(clique=clique), "a")


def test_a_host_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no host 'z'"):
        node_labels(tray(), "z")
