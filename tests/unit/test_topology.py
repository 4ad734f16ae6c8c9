"""Topology records: ids and names hold together, every fact has a source, the better source is believed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.errors import ConfigError
from wsync.topology import Device, Domain, DomainKind, Host, Link, Nic, NicKind, Source, Topology

HOST = Host(host_id="h")
GPU = Device(device_id="h/gpu0", host_id="h")
PEER = Device(device_id="h/gpu1", host_id="h")
NIC = Nic(nic_id="h/mlx5_0", host_id="h")
PART_OF_NIC = Device(device_id="p", host_id="h", partition_of="h/mlx5_0")
RACK_OF_GPUS = Domain(domain_id="r", kind=DomainKind.RACK, members=("h/gpu0",))


def gpu(source: Source, **fields: Any) -> Device:
    return Device.told(source, device_id="h/gpu0", host_id="h", **fields)


def nvlink(*members: str, **fields: Any) -> Domain:
    return Domain(domain_id="fabric.1", kind=DomainKind.NVLINK, members=members, **fields)


def test_told_names_the_source_of_every_field_that_is_known() -> None:
    device = gpu(Source.DRIVER, index=0, name="NVIDIA H100 80GB HBM3", memory_nbytes=0)
    assert device.known_fields() == ["index", "name"]
    assert device.facts == {"index": Source.DRIVER, "name": Source.DRIVER}


def test_a_value_that_could_be_taken_for_unknown_is_known_where_it_is_not_the_default() -> None:
    assert gpu(Source.SYSFS, numa_node=0, index=0).known_fields() == ["index", "numa_node"]
    down = Nic.told(Source.SYSFS, nic_id="h/eth0", host_id="h", is_up=False, rail=0)
    assert down.facts == {"is_up": Source.SYSFS, "rail": Source.SYSFS}


def test_identities_are_no_facts() -> None:
    assert gpu(Source.DRIVER).facts == {}
    assert Domain.told(Source.DRIVER, domain_id="d", kind=DomainKind.NVLINK).facts == {}


def test_a_fact_without_a_source_is_refused_once_any_has_one() -> None:
    with pytest.raises(ConfigError, match="nobody told memory_nbytes"):
        Device(device_id="h/gpu0", host_id="h", index=0, memory_nbytes=1, facts={"index": Source.DRIVER})


def test_a_source_of_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="colour"):
        Device(device_id="h/gpu0", host_id="h", facts={"colour": Source.DRIVER})


@pytest.mark.parametrize("first_is_better", [True, False])
@pytest.mark.parametrize(
    ("better", "worse"), [(a, b) for rank, a in enumerate(Source) for b in list(Source)[rank + 1 :]]
)
def test_the_better_source_is_believed_in_either_order(better: Source, worse: Source, first_is_better: bool) -> None:
    told, other = gpu(better, memory_nbytes=80), gpu(worse, memory_nbytes=79, name="H100")
    both = told.joined(other) if first_is_better else other.joined(told)
    assert (both.memory_nbytes, both.facts["memory_nbytes"]) == (80, better)
    assert (both.name, both.facts["name"]) == ("H100", worse)


def test_sources_come_in_the_order_of_trust() -> None:
    assert [*Source] == ["measured", "declared", "driver", "sysfs", "platform", "table"]


def test_of_equal_sources_the_first_is_believed() -> None:
    assert gpu(Source.DRIVER, memory_nbytes=1).joined(gpu(Source.DRIVER, memory_nbytes=2)).memory_nbytes == 1


def test_joining_nothing_new_changes_nothing() -> None:
    device = gpu(Source.DRIVER, memory_nbytes=1)
    assert device.joined(gpu(Source.TABLE, memory_nbytes=2)) is device


def test_a_record_written_by_hand_is_declared() -> None:
    """A topology file need not say who told its values."""
    by_hand = Device(device_id="h/gpu0", host_id="h", memory_nbytes=80)
    for both in (
        by_hand.joined(gpu(Source.DRIVER, memory_nbytes=79)),
        gpu(Source.DRIVER, memory_nbytes=79).joined(by_hand),
    ):
        assert (both.memory_nbytes, both.sources) == (80, {"memory_nbytes": Source.DECLARED})
    assert by_hand.joined(gpu(Source.MEASURED, memory_nbytes=81, name="H100")) == Device(
        device_id="h/gpu0",
        host_id="h",
        memory_nbytes=81,
        name="H100",
        facts={"memory_nbytes": Source.MEASURED, "name": Source.MEASURED},
    )


def test_hosts_of_a_fabric_tell_of_their_own_devices_and_all_are_in() -> None:
    topologies = [
        Topology(
            hosts=(Host(host_id=name),),
            devices=(Device(device_id=f"{name}/gpu0", host_id=name),),
            domains=(
                Domain.told(Source.DRIVER, domain_id="fabric.1", kind=DomainKind.NVLINK, members=(f"{name}/gpu0",)),
            ),
        )
        for name in ("a", "b")
    ]
    both = topologies[0].joined(topologies[1])
    assert both.domains[0].members == ("a/gpu0", "b/gpu0")
    assert both.joined(topologies[1]) == both


def test_members_of_a_better_source_replace_those_of_a_worse_one() -> None:
    names: dict[str, Any] = {"domain_id": "fabric.1", "kind": DomainKind.NVLINK}
    label = Domain.told(Source.PLATFORM, **names, members=("h/gpu0", "h/gpu1"))
    driver = Domain.told(Source.DRIVER, **names, members=("h/gpu0",), nbytes_per_s=1.0)
    assert label.joined(driver).members == driver.joined(label).members == ("h/gpu0",)
    assert label.joined(driver).nbytes_per_s == 1.0


def test_topologies_join_records_of_one_id_and_links_of_one_pair() -> None:
    one = Topology(hosts=(HOST,), devices=(GPU, PEER), links=(Link(a="h/gpu0", b="h/gpu1", kind="NV18"),), notes=("n",))
    rate = Link.told(Source.MEASURED, a="h/gpu1", b="h/gpu0", kind="NV18", nbytes_per_s=4e11)
    other = Topology(hosts=(HOST,), devices=(gpu(Source.DRIVER, index=0), PEER), links=(rate,), notes=("n", "m"))
    both = one.joined(other)
    assert both.devices == (gpu(Source.DRIVER, index=0), PEER)
    assert len(both.links) == 1
    assert both.link("h/gpu0", "h/gpu1") == both.link("h/gpu1", "h/gpu0") == both.links[0]
    assert both.links[0].nbytes_per_s == 4e11
    assert both.notes == ("n", "m")


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"hosts": (HOST, HOST)}, "'h' is a host and a host"),
        ({"hosts": (HOST,), "devices": (GPU, GPU)}, "'h/gpu0' is a device and a device"),
        ({"hosts": (HOST,), "devices": (GPU,), "nics": (Nic(nic_id="h/gpu0", host_id="h"),)}, "a device and a NIC"),
        ({"hosts": (HOST,), "domains": (Domain(domain_id="h", kind=DomainKind.RACK),)}, "a host and a domain"),
        ({"devices": (GPU,)}, "'h/gpu0' names 'h', which is no host"),
        ({"nics": (NIC,)}, "'h/mlx5_0' names 'h', which is no host"),
        (
            {"hosts": (HOST,), "devices": (Device(device_id="p", host_id="h", partition_of="h/gpu7"),)},
            "'p' names 'h/gpu7', which is no device",
        ),
        (
            {"hosts": (HOST,), "nics": (NIC,), "devices": (PART_OF_NIC,)},
            "'p' names 'h/mlx5_0', which is no device",
        ),
        ({"domains": (nvlink("h/gpu0"),)}, "'fabric.1' names 'h/gpu0', which is no device"),
        ({"hosts": (HOST,), "domains": (nvlink("h"),)}, "'fabric.1' names 'h', which is no device"),
        (
            {"hosts": (HOST,), "devices": (GPU,), "domains": (RACK_OF_GPUS,)},
            "'r' names 'h/gpu0', which is no host or domain",
        ),
        (
            {"hosts": (HOST,), "devices": (GPU,), "links": (Link(a="h/gpu0", b="h/gpu9", kind="PIX"),)},
            "names 'h/gpu9', which is no device or NIC",
        ),
        (
            {"hosts": (HOST,), "devices": (GPU,), "links": (Link(a="h", b="h/gpu0", kind="PIX"),)},
            "names 'h', which is no device or NIC",
        ),
    ],
)  # fmt: skip
def test_a_topology_that_does_not_hold_together_is_refused(parts: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Topology(**parts)


def test_a_domain_may_hold_smaller_domains() -> None:
    rack = Domain(domain_id="rack/1", kind=DomainKind.RACK, members=("h",))
    zone = Domain(domain_id="zone/a", kind=DomainKind.ZONE, members=("rack/1",))
    topology = Topology(hosts=(HOST,), domains=(zone, rack))
    assert topology.domain_of("h", DomainKind.RACK) == rack
    assert topology.domain_of("rack/1", DomainKind.ZONE) == zone
    assert topology.domain_of("h", DomainKind.ZONE) is None


def test_scale_up_domains_are_those_of_devices() -> None:
    scale_up = {kind for kind in DomainKind if Domain(domain_id="d", kind=kind).is_scale_up}
    assert scale_up == {"nvlink", "xgmi", "neuronlink", "ici", "gaudi"}


def test_what_is_of_a_host_is_found_by_it() -> None:
    other = Device(device_id="i/gpu0", host_id="i")
    topology = Topology(hosts=(HOST, Host(host_id="i")), devices=(GPU, other, PEER), nics=(NIC,))
    assert topology.host_devices("h") == (GPU, PEER)
    assert topology.host_nics("h") == (NIC,)
    assert topology.host_nics("i") == ()
    assert topology.link("h/gpu0", "h/mlx5_0") is None


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 15),
        "memory_nbytes": st.integers(1, 2**63 - 1),
        "link_nbytes_per_s": st.floats(1, 1e12),
        "numa_node": st.integers(0, 7),
        "name": st.text(min_size=1, max_size=8),
    },
)


@given(st.lists(st.tuples(st.sampled_from(Source), FIELDS), min_size=1, max_size=6))
def test_whatever_is_joined_every_known_field_has_its_best_source(told: list[tuple[Source, dict[str, Any]]]) -> None:
    device = GPU
    for source, fields in told:
        device = device.joined(gpu(source, **fields))
    rank = list(Source).index
    for name in {name for _, fields in told for name in fields}:
        values = [(rank(source), order, fields[name]) for order, (source, fields) in enumerate(told) if name in fields]
        best = min(values)
        assert (rank(device.facts[name]), getattr(device, name)) == (best[0], best[2])
    assert set(device.known_fields()) == set(device.facts)


@given(st.sampled_from(Source), FIELDS)
def test_a_topology_survives_json(source: Source, fields: dict[str, Any]) -> None:
    topology = Topology(
        hosts=(Host.told(Source.SYSFS, host_id="h", memlock_nbytes=2**63 - 1),),
        devices=(gpu(source, **fields), PEER),
        nics=(Nic.told(Source.SYSFS, nic_id="h/mlx5_0", host_id="h", kind=NicKind.ROCE, is_up=False, rail=0),),
        domains=(Domain.told(source, domain_id="d", kind=DomainKind.XGMI, members=("h/gpu0", "h/gpu1")),),
        links=(Link.told(source, a="h/gpu0", b="h/mlx5_0", kind="PIX", overhead_s=1e-5),),
        notes=("one note",),
    )
    text = msgspec.json.encode(topology)
    assert msgspec.json.decode(text, type=Topology) == topology


def test_json_that_does_not_hold_together_or_has_further_fields_is_refused() -> None:
    for text in (
        '{"devices": [{"device_id": "h/gpu0", "host_id": "h"}]}',
        '{"hosts": [{"host_id": "h", "colour": "red"}]}',
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=Topology)


def test_what_is_around_a_host_is_its_own_and_the_domains_it_is_in_without_the_others() -> None:
    whole = Topology(
        hosts=(HOST, Host(host_id="other")),
        devices=(GPU, PEER, Device(device_id="other/gpu0", host_id="other")),
        nics=(NIC, Nic(nic_id="other/nic", host_id="other")),
        domains=(
            Domain(domain_id="zone", kind=DomainKind.ZONE, members=("rack", "empty")),
            nvlink("h/gpu0", "h/gpu1", "other/gpu0", nbytes_per_s=9e11),
            Domain(domain_id="rack", kind=DomainKind.RACK, members=("h", "other"), uplink_nbytes_per_s=1e9),
            Domain(domain_id="empty", kind=DomainKind.RACK, members=("other",)),
        ),
        links=(Link(a="h/gpu0", b="h/mlx5_0", kind="PIX"), Link(a="h/gpu0", b="other/gpu0", kind="NV18")),
    )
    here = whole.around("h")
    assert here.hosts == (HOST,)
    assert (here.devices, here.nics) == ((GPU, PEER), (NIC,))
    assert {domain.domain_id: domain.members for domain in here.domains} == {
        "zone": ("rack",),
        "fabric.1": ("h/gpu0", "h/gpu1"),
        "rack": ("h",),
    }
    assert [link.kind for link in here.links] == ["PIX"]
    assert here.joined(whole.around("other")).domains[1].members == ("h/gpu0", "h/gpu1", "other/gpu0")
    with pytest.raises(ConfigError, match="'x' is not in the topology"):
        whole.around("x")
