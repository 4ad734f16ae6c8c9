"""Which paths two ends have: only what both have, the most direct first, at the rate of the narrower end."""

from __future__ import annotations

import pytest

from wsync.errors import ConfigError
from wsync.paths import Medium, Path, between
from wsync.topology import Device, Domain, DomainKind, Host, Nic, NicKind, Topology

HOPPER = ("cuda_ipc", "nccl", "ucx", "libfabric")


def nic(host: str, number: int, kind: NicKind, rate: float = 50e9, **fields: object) -> Nic:
    return Nic(nic_id=f"{host}/nic{number}", host_id=host, kind=kind, nbytes_per_s=rate, **fields)  # type: ignore[arg-type]


def device(host: str, number: int, paths: tuple[str, ...] = HOPPER) -> Device:
    return Device(device_id=f"{host}/gpu{number}", host_id=host, paths=paths, num_links=18, link_nbytes_per_s=25e9)


def cluster(*nics: Nic, devices: tuple[Device, ...] = (), domains: tuple[Domain, ...] = ()) -> Topology:
    names = sorted({part.host_id for part in (*nics, *devices)})
    return Topology(hosts=tuple(Host(host_id=n) for n in names), devices=devices, nics=nics, domains=domains)


def names(topology: Topology, a: str, b: str) -> list[str]:
    return [path.name for path in between(topology, a, b)]


def nvlink(*members: str, kind: DomainKind = DomainKind.NVLINK) -> Domain:
    return Domain(domain_id="island", kind=kind, members=members)


def test_devices_of_one_nvlink_domain_on_one_host_use_cuda_ipc_at_the_rate_of_their_links() -> None:
    topology = cluster(devices=(device("a", 0), device("a", 1)), domains=(nvlink("a/gpu0", "a/gpu1"),))
    assert between(topology, "a/gpu0", "a/gpu1") == (
        Path("cuda_ipc", Medium.SCALE_UP, 18 * 25e9, "nvlink domain island"),
        Path("shm", Medium.HOST, 0.0, "through the memory of their host"),
    )


def test_a_device_that_fell_off_its_domain_goes_through_the_host() -> None:
    devices = (device("a", 0), device("a", 1), device("a", 2))
    topology = cluster(devices=devices, domains=(nvlink("a/gpu0", "a/gpu1"),))
    assert names(topology, "a/gpu0", "a/gpu2") == ["shm"]


def test_cuda_ipc_does_not_leave_the_host_and_fabric_handles_do() -> None:
    nics = (nic("a", 0, NicKind.INFINIBAND), nic("b", 0, NicKind.INFINIBAND))
    for paths, expected in ((HOPPER, ["nixl", "tcp"]), ((*HOPPER, "cuda_fabric"), ["cuda_fabric", "nixl", "tcp"])):
        devices = (device("a", 0, paths), device("b", 0, paths))
        assert (
            names(cluster(*nics, devices=devices, domains=(nvlink("a/gpu0", "b/gpu0"),)), "a/gpu0", "b/gpu0")
            == expected
        )


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((NicKind.INFINIBAND, NicKind.INFINIBAND), "UCX over InfiniBand"),
        ((NicKind.ROCE, NicKind.ROCE), "UCX over RoCE"),
        ((NicKind.EFA, NicKind.EFA), "libfabric over EFA"),
        ((NicKind.INFINIBAND, NicKind.ROCE), None),
        ((NicKind.EFA, NicKind.ETHERNET), None),
    ],
)
def test_rdma_needs_one_kind_of_nic_on_both_sides(kinds: tuple[NicKind, NicKind], expected: str | None) -> None:
    nics = (nic("a", 0, kinds[0]), nic("b", 0, kinds[1], rate=25e9))
    topology = cluster(*nics, devices=(device("a", 0), device("b", 0)))
    for ends in (("a", "b"), ("a/gpu0", "b/gpu0")):
        found = {path.name: path for path in between(topology, *ends)}
        assert found["tcp"].medium is Medium.IP
        if expected is None:
            assert set(found) == {"tcp"}
        else:
            assert found["nixl"] == Path("nixl", Medium.RDMA, 25e9, expected)


def test_a_device_without_that_software_is_not_reached_by_rdma_though_its_host_is() -> None:
    nics = (nic("a", 0, NicKind.EFA), nic("b", 0, NicKind.EFA))
    topology = cluster(*nics, devices=(device("a", 0), device("b", 0, ("cuda_ipc", "ucx"))))
    assert names(topology, "a/gpu0", "b/gpu0") == ["tcp"]
    assert names(topology, "a", "b") == ["nixl", "tcp"]


def test_a_port_that_is_down_carries_nothing_and_devices_share_what_their_host_has() -> None:
    nics = (
        nic("a", 0, NicKind.INFINIBAND),
        nic("a", 1, NicKind.INFINIBAND),
        nic("a", 2, NicKind.INFINIBAND, is_up=False),
        nic("b", 0, NicKind.INFINIBAND, rate=200e9),
        nic("b", 1, NicKind.ETHERNET, rate=1e9),
    )
    devices = (*(device("a", i) for i in range(4)), device("b", 0))
    topology = cluster(*nics, devices=devices)
    assert between(topology, "a/gpu0", "b/gpu0")[0].nbytes_per_s == 2 * 50e9 / 4
    assert between(topology, "a", "b")[0].nbytes_per_s == 100e9


def test_one_nic_of_unknown_rate_makes_the_rate_unknown() -> None:
    nics = (nic("a", 0, NicKind.ETHERNET, 1e9), nic("a", 1, NicKind.ETHERNET, 0.0), nic("b", 0, NicKind.ETHERNET, 1e9))
    assert between(cluster(*nics), "a", "b") == (Path("tcp", Medium.IP, 0.0, "from host memory to host memory"),)


@pytest.mark.parametrize(
    ("kind", "paths", "same_host", "other_host"),
    [
        (DomainKind.XGMI, ("hip_ipc", "ucx"), ["hip_ipc", "shm"], ["tcp"]),
        (DomainKind.ICI, ("ici", "dcn"), ["ici", "shm"], ["ici", "dcn", "tcp"]),
        (DomainKind.NEURONLINK, ("neuron_cc", "libfabric"), ["neuron_cc", "shm"], ["neuron_cc", "tcp"]),
        (DomainKind.GAUDI, ("hccl",), ["hccl", "shm"], ["hccl", "tcp"]),
    ],
)
def test_each_vendor_fabric_has_its_own_mechanism(
    kind: DomainKind, paths: tuple[str, ...], same_host: list[str], other_host: list[str]
) -> None:
    devices = (device("a", 0, paths), device("a", 1, paths), device("b", 0, paths))
    topology = cluster(devices=devices, domains=(nvlink("a/gpu0", "a/gpu1", "b/gpu0", kind=kind),))
    assert names(topology, "a/gpu0", "a/gpu1") == same_host
    assert names(topology, "a/gpu0", "b/gpu0") == other_host


def test_devices_without_a_domain_use_pcie_peer_to_peer_if_both_can() -> None:
    topology = cluster(devices=(device("a", 0, ("pcie_p2p",)), device("a", 1, ("pcie_p2p",)), device("a", 2)))
    assert names(topology, "a/gpu0", "a/gpu1") == ["pcie_p2p", "shm"]
    assert names(topology, "a/gpu0", "a/gpu2") == ["shm"]


@pytest.mark.parametrize(("a", "b"), [("a", "a/gpu0"), ("a", "nobody"), ("a/nic0", "a/nic0")])
def test_ends_that_are_not_two_devices_or_two_hosts_are_refused(a: str, b: str) -> None:
    topology = cluster(nic("a", 0, NicKind.ETHERNET), devices=(device("a", 0),))
    with pytest.raises(ConfigError, match=f"'{a}' and '{b}'"):
        between(topology, a, b)


def test_nothing_has_a_path_to_itself() -> None:
    topology = cluster(nic("a", 0, NicKind.ETHERNET), devices=(device("a", 0),))
    assert between(topology, "a", "a") == between(topology, "a/gpu0", "a/gpu0") == ()
